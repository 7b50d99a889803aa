"""Weights from a file, or published by torchvision, into a model: all of them, or the tensors that stay random are named."""

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.models import zoo
from trainer.models.head import classifier
from trainer.runtime import UserError

# What `save_model` writes into a model folder.
WEIGHTS_FILE = "model.safetensors"


def load_tensors(module: nn.Module, tensors: dict[str, Tensor], left: Sequence[str] = ()) -> None:
    """Load a state dict, all of it, into the module.

    A safetensors file does not keep the versions of layers, and some refuse tensors of an unknown one (torchvision's MNASNet): they are
    taken for this module's.

    Args:
        left: names that may be missing.

    Raises:
        ValueError: tensors are missing, unknown to the module or of other shapes; named in few words.
    """
    own: Any = module.state_dict()
    versioned: Any = OrderedDict(tensors)
    versioned._metadata = getattr(tensors, "_metadata", own._metadata)
    # A lazy layer takes any shape.
    shapes = {name: (tensor.shape, own[name].shape) for name, tensor in tensors.items() if name in own and not is_lazy(own[name])}
    differing = [f"{name} is {_shape(this)} instead of {_shape(that)}" for name, (this, that) in shapes.items() if this != that]
    missing, unexpected = [name for name in own if name not in tensors], [name for name in tensors if name not in own]
    if not differing:
        # Not those that a layer knows by an older name.
        missing, unexpected = module.load_state_dict(versioned, strict=False)
    missing = [name for name in missing if name not in left]
    wrong = [f"it lacks {shortened(missing)}"] if missing else []
    wrong += [f"it has {shortened(sorted(unexpected))}, unknown to the model"] if unexpected else []
    wrong += [shortened(differing)] if differing else []
    if wrong:
        raise ValueError(", ".join(wrong))


def find_file(weights: str, names: str = "") -> Path:
    """The file that `--weights` names: itself, or the weights in a model folder.

    Args:
        names: what else could be named, for the error.

    Raises:
        UserError: there is none.
    """
    path = Path(weights)
    if path.is_dir():
        path /= WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f"--weights {weights}: there is no file {path}: name a model folder, a .safetensors file, a state dict of torch (.pth){names}"
        )
    return path


def read(weights: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a model folder, or of a state dict that torch.save wrote; nothing is executed.

    Raises:
        UserError: it is not there, is broken, or holds something else than tensors.
    """
    path = find_file(weights)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            # On how a file was pickled.
            warnings.simplefilter("ignore")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's text goes on with how to execute it.
        raise UserError(
            f"--weights {weights}: {path} is no file of torch, or holds more than tensors, which is not executed: give a state dict"
        ) from None
    except Exception as error:
        raise UserError(f"--weights {weights}: {path} cannot be read ({' '.join(str(error).split())}): give another file") from None
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        held = f"holds {shortened(list(map(str, content)))}" if isinstance(content, dict) else f"holds a {type(content).__name__}"
        raise UserError(f"--weights {weights}: {path} is no state dict, it {held}: save the model's state_dict() alone")
    return content


def load_weights(weights: str, architecture: str, module: nn.Module, num_classes: int) -> str:
    """Load what `--weights` names into the model; returns where the weights come from, and what was done to them, in words.

    Colour weights are summed for grey images; a classifier for another number of classes is left out and stays random.

    Args:
        weights: a file, a model folder, or a name of torchvision's for `architecture`.
        module: a model of torchvision, or any other, with fresh weights.

    Raises:
        UserError: they cannot be read, or do not fit the model.
    """
    if published(weights, architecture):
        tensors, note = zoo.download(architecture, weights)
        words = [f"{weights} of torchvision", note]
    else:
        tensors, words = read(weights), [f"from {weights}"]
    try:
        words += _fit(tensors, architecture, module, num_classes)
    except Exception as error:
        raise UserError(
            f"--weights {weights} does not fit --model {architecture}: {' '.join(str(error).split())}: give weights of that model"
        ) from None
    return "; ".join(words)


def _fit(tensors: dict[str, Tensor], architecture: str, module: nn.Module, num_classes: int) -> list[str]:
    """Load tensors, changed in place to what the model needs; returns what was changed, in words."""
    words = zoo.translate(architecture, module, tensors) if is_zoo(architecture) else []
    own = module.state_dict()
    first = zoo.first_convolution(module)
    key = next((f"{name}.weight" for name, layer in module.named_modules() if layer is first), "")
    if first is not None and first.in_channels == 1 and key in tensors and tensors[key].shape[1:2] == (3,):
        tensors[key] = zoo.to_grey(architecture, tensors[key])
        words.append(f"{key} summed over colours")
    head = classifier(module, num_classes)
    left = [
        name
        for name in (f"{head}.weight".lstrip("."), f"{head}.bias".lstrip("."))
        if name in tensors and name in own and tensors[name].shape != own[name].shape and tensors[name].shape[1:] == own[name].shape[1:]
    ]
    if left:
        words.append(f"{' and '.join(left)} random, since {len(tensors[left[0]])} classes were trained and these are {num_classes}")
    for name in left:
        del tensors[name]
    load_tensors(module, tensors, left)
    return words


def is_zoo(architecture: str) -> bool:
    """Whether the model is torchvision's: neither our own nor a factory's."""
    return architecture != "convnet" and ":" not in architecture


def published(weights: str, architecture: str) -> bool:
    """Whether `--weights` is a name of torchvision's for this model."""
    return is_zoo(architecture) and weights in zoo.weights_names(architecture)


def check_weights(weights: str, architecture: str) -> None:
    """Whether there is something of that name, before anything is built.

    Raises:
        UserError: there is not.
    """
    if not published(weights, architecture):
        find_file(weights, f", or one of torchvision's ({', '.join(zoo.weights_names(architecture))})" if is_zoo(architecture) else "")


def shortened(words: Sequence[str], limit: int = 3) -> str:
    """The first words, and how many more there are."""
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if len(words) > limit else "")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"
