"""A model's classifier: found, and trained alone."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from trainer.runtime import UserError


def classifier(module: nn.Module, num_classes: int) -> str | None:
    """The name of the last linear layer with `num_classes` outputs, or else of the last such convolution; None without either."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer.out_features == num_classes]
    convolutions = [name for name, layer in module.named_modules() if isinstance(layer, _ConvNd) and layer.out_channels == num_classes]
    return next(reversed(linear or convolutions), None)


def freeze_backbone(architecture: str, module: nn.Module, num_classes: int) -> None:
    """Take the gradients from all parameters but the classifier's. Before the optimizer is built and before prepare().

    Raises:
        UserError: no classifier is found.
    """
    name = classifier(module, num_classes)
    if name is None:
        raise UserError(
            f"--freeze backbone finds no classifier in --model {architecture}: its last layer must be a Linear or a convolution with "
            f"{num_classes} outputs; leave --freeze out",
            agreed=True,
        )
    module.requires_grad_(False)
    module.get_submodule(name).requires_grad_(True)


def train_mode(module: nn.Module, freeze: str) -> None:
    """`module.train()`; with a frozen backbone its BatchNorm layers, which are all there are, stay as they are: in evaluation mode."""
    module.train()
    if freeze == "backbone":
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
