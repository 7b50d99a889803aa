"""torchvision's classification models, for grey or colour images of one size and any number of classes.

torchvision is imported here only, and only when one of its models is asked for.
"""

import io
import re
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.runtime import UserError

# These two bring ImageNet's normalisation, in which all others take their images, to deviations of 0.5, in which their published weights
# were trained. Always, so that a saved model is built in one way, whatever its weights were.
RESCALED = ("googlenet", "inception_v3")
SCALE = (0.229 / 0.5, 0.224 / 0.5, 0.225 / 0.5)
# Layers of the auxiliary classifiers of those two, which are left out.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
# DenseNet's layers as its published weights call them, made in 2017 when names could have dots: denselayer1.norm.1.weight.
DOTTED = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


def library(name: str) -> ModuleType:
    """torchvision.models, for the model `name`.

    Raises:
        UserError: torchvision is not installed, or not for this torch.
    """
    try:
        from torchvision import models
    except Exception as error:
        raise UserError(
            f"--model {name} needs torchvision, which cannot be imported ({' '.join(str(error).split())}): install the release that goes "
            f"with torch {torch.__version__}"
        ) from None
    module: ModuleType = models
    return module


def names(name: str) -> list[str]:
    """The classification models that torchvision has, asked because of the model `name`."""
    models = library(name)
    return list(models.list_models(module=models))


def build(name: str, in_channels: int, size: tuple[int, int], num_classes: int) -> nn.Module:
    """The model with fresh weights from torch's default generator.

    For grey images the first convolution's weights are summed over its channels: it does what the colour model does with the grey image in
    all three.

    Args:
        name: one of `names`.
        in_channels: C of the images, 1 or 3.
        size: (height, width) of the images, pixels.
        num_classes: outputs.

    Raises:
        UserError: the model does not take such images.
    """
    if in_channels not in (1, 3):
        raise UserError(f"--model {name} takes grey or colour images, and these have {in_channels} channels: convert them first")
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        if size[0] != size[1]:
            raise UserError(f"--model {name} takes square images, and these are {size[0]} x {size[1]}: choose another model")
        options["image_size"] = size[0]
    if name == "maxvit_t":
        options["input_size"] = size
    if name in RESCALED:
        options |= {"aux_logits": False, "init_weights": True, "transform_input": in_channels == 3}
    try:
        module: nn.Module = library(name).get_model(name, weights=None, num_classes=num_classes, **options)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(cannot_take(name, in_channels, size, error)) from None
    if in_channels == 1:
        first = first_convolution(module)
        assert first is not None, name
        first.in_channels = 1
        first.weight = nn.Parameter(to_grey(name, first.weight.detach()))
    return module


def cannot_take(name: str, in_channels: int, size: tuple[int, int], error: Exception) -> str:
    """The sentence for a model that is too deep for such images, or wants others."""
    reason, shape = " ".join(str(error).split()) or type(error).__name__, f"{in_channels} x {size[0]} x {size[1]}"
    return f"--model {name} cannot take images of {shape} ({reason}): choose another model, or images of another size"


def first_convolution(module: nn.Module) -> nn.Conv2d | None:
    return next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)


def to_grey(name: str, weight: Tensor) -> Tensor:
    """A first convolution's weights for grey images: (O, 3, H, W) -> (O, 1, H, W), the sum over the channels."""
    if name in RESCALED:
        weight = weight * torch.tensor(SCALE, dtype=weight.dtype, device=weight.device).view(1, 3, 1, 1)
    return weight.sum(1, keepdim=True)


def weights_names(name: str) -> list[str]:
    """The published weights of the model `name`, by torchvision's names, DEFAULT among them."""
    return list(library(name).get_model_weights(name).__members__)


def download(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    """Published weights, from torch's cache or from the network, loaded without executing anything; and what they are for.

    Raises:
        UserError: they cannot be had; with the address.
    """
    published = library(name).get_model_weights(name)[weights]
    terminal = sys.stderr.isatty()
    try:
        with ExitStack() as quiet:
            if not terminal:
                # torch says that it downloads: in a log one line too many.
                quiet.enter_context(redirect_stdout(io.StringIO()))
                quiet.enter_context(redirect_stderr(io.StringIO()))
            tensors: dict[str, Tensor] = published.get_state_dict(progress=terminal, check_hash=True, weights_only=True)
    except Exception as error:
        raise UserError(
            f"--weights {weights}: {published.url} cannot be downloaded or read ({' '.join(str(error).split())}): get that file by other "
            f"means and give it by --weights FILE, or put it into {torch.hub.get_dir()}/checkpoints"
        ) from None
    preset = published.transforms()
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in (preset.mean, preset.std))
    return tensors, f"made for pixels of mean {mean} and deviation {std}"


def translate(name: str, module: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Give published weights, in place, the names and shapes that this torchvision's model has; returns what was done, in words.

    What needs no change stays as it is, so that the trainer's own files pass too.
    """
    done = []
    if name in RESCALED:
        for key in [key for key in tensors if key.startswith(AUXILIARY)]:
            del tensors[key]
    if name.startswith("densenet"):
        for key in [key for key in tensors if DOTTED.search(key)]:
            tensors[DOTTED.sub(r"\1\2.", key)] = tensors.pop(key)
    place = "encoder.pos_embedding"
    if name.startswith("vit_") and place in tensors:
        own: Any = module
        before, square = tensors[place].shape[1] - 1, int(own.image_size)
        if before != own.encoder.pos_embedding.shape[1] - 1 and round(before**0.5) ** 2 == before:
            from torchvision.models.vision_transformer import interpolate_embeddings

            interpolate_embeddings(square, own.patch_size, tensors)
            done.append(f"positions interpolated for images of {square} x {square}")
    return done
