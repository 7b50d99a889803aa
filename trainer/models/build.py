"""Name -> model, tried on the images' size, and its BatchNorm layers synchronised over the processes."""

import difflib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer import named
from trainer.config import Config
from trainer.models import factory, sync_batchnorm, zoo
from trainer.models.convnet import ConvNet
from trainer.models.weights import check_weights, load_weights
from trainer.runtime import UserError
from trainer.seeding import seeded


def build_model(architecture: str, in_channels: int, size: tuple[int, int], num_classes: int) -> nn.Module:
    """A model with fresh weights from torch's default generator.

    Args:
        architecture: 'convnet', a name of torchvision's classification models, or `package.module:factory`, which runs code.
        in_channels: C of the images.
        size: (height, width) of the images, pixels.
        num_classes: outputs.

    Raises:
        UserError: there is no such model, or it cannot be built so.
    """
    if architecture == "convnet":
        return ConvNet(in_channels, size, num_classes)
    if ":" in architecture:
        return factory.build(architecture, in_channels, size, num_classes)
    _check_name(architecture)
    return zoo.build(architecture, in_channels, size, num_classes)


def check_model(config: Config, resumed: bool) -> None:
    """Whether `--model` and `--weights` name something, before the data are read.

    Args:
        resumed: the weights are a checkpoint's.

    Raises:
        UserError: they do not.
    """
    if ":" in config.model:
        named.find("--model", config.model)
    elif config.model != "convnet":
        _check_name(config.model)
    if config.weights != "none" and not resumed:
        check_weights(config.weights, config.model)


def _check_name(architecture: str) -> None:
    names = [*zoo.names(architecture), "convnet"]
    if architecture not in names:
        close = difflib.get_close_matches(architecture, names)
        raise UserError(
            f"--model {architecture}: there is no such model: "
            + (
                f"did you mean {', '.join(close)}?"
                if close
                else "give convnet, a classification model of torchvision, or package.module:factory"
            )
        )


def make_model(
    config: Config, in_channels: int, size: tuple[int, int], num_classes: int, smallest_batch: int, resumed: bool
) -> tuple[nn.Module, str]:
    """The model that the config asks for, on the CPU, and where its weights come from, in words.

    Args:
        in_channels, size, num_classes: see `build_model`.
        smallest_batch: images that a BatchNorm layer sees at once, at least, in training.
        resumed: a checkpoint's weights will be loaded: those of `--weights` need not be there any more.

    Raises:
        UserError: the model cannot be built, does not take such images, or the weights do not fit it.
    """
    module = build_model(config.model, in_channels, size, num_classes)
    if config.model != "convnet":
        try_images(config.model, module, in_channels, size, num_classes, 2 if config.freeze == "backbone" else smallest_batch)
    if resumed:
        return module, "the checkpoint's"
    return module, load_weights(config.weights, config.model, module, num_classes) if config.weights != "none" else "random"


@torch.no_grad()
def try_images(
    architecture: str, module: nn.Module, in_channels: int, size: tuple[int, int], num_classes: int, smallest_batch: int = 2
) -> None:
    """Take two black images through the model, on the CPU, in evaluation mode; no buffer, mode or generator is another one afterwards.

    Args:
        smallest_batch: images that a BatchNorm layer sees at once, at least, in training.

    Raises:
        UserError: that fails, gives no logits (2, num_classes), there is nothing to train, or BatchNorm would see a single value.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"--model {architecture} has no parameter that takes a gradient: there is nothing to train")
    values: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: values.append(inputs[0][0, 0].numel())) for layer in batchnorm_layers(module)
    ]
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    shape = f"{in_channels} x {size[0]} x {size[1]}"
    try:
        with seeded(0):
            logits = module(torch.zeros(2, in_channels, *size))
    except Exception as error:
        raise UserError(zoo.cannot_take(architecture, in_channels, size, error)) from None
    finally:
        for layer, training in modes:
            layer.training = training
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor):
        raise UserError(f"--model {architecture} returns a {type(logits).__name__}: let it return the logits, a tensor (B, {num_classes})")
    if logits.shape != (2, num_classes):
        raise UserError(
            f"--model {architecture} returns {' x '.join(map(str, logits.shape))} numbers for 2 images, not 2 x {num_classes}: "
            "let it take num_classes"
        )
    if smallest_batch == 1 and 1 in values:
        raise UserError(
            f"--model {architecture} on images of {shape} normalises over the batch alone, and each epoch has a batch of one image: "
            "choose another --batch_size"
        )


def keep_strides(model: nn.Module) -> None:
    """Bring the gradients of convolutions to the strides of their weights, before DDP sees them.

    A dimension of 1 (depthwise, 1 x 1 and grey convolutions) leaves its stride open, and backward chooses another than the weight has where
    the images lie in channels_last, as within torchvision's ConvNeXt. DDP would warn of it, and copy (pytorch#47163).
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim == 4 and 1 in parameter.shape:
            parameter.register_hook(partial(_restride, parameter.stride()))


def _restride(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    if gradient.stride() != strides and gradient.is_contiguous():
        return gradient.as_strided(gradient.shape, strides)
    return gradient


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def only_batchnorm_buffers(model: nn.Module) -> bool:
    """Whether all buffers are BatchNorm's statistics, which no forward pass in training reads."""
    return sum(1 for _ in model.buffers()) == sum(1 for layer in batchnorm_layers(model) for _ in layer.buffers(recurse=False))


def synchronise_batchnorm(model: nn.Module, device: torch.device) -> tuple[nn.Module, int]:
    """The model with synchronised BatchNorm, and the number of converted layers. Before the optimizer is built and before prepare().

    torch's own conversion on CUDA; elsewhere ours, since torch's layer refuses CPU tensors.
    """
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm if device.type == "cuda" else sync_batchnorm.convert
    kind = nn.SyncBatchNorm if device.type == "cuda" else sync_batchnorm.SyncBatchNorm
    converted: nn.Module = convert(model)
    return converted, sum(isinstance(module, kind) for module in converted.modules())
