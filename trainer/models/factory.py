"""A model of one's own: `package.module:factory`, a function or a class."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainer.config import suggestion
from trainer.runtime import UserError


def find(name: str) -> Callable[..., Any]:
    """The callable that `package.module:factory` names; its module is imported, from the current folder too.

    Raises:
        UserError: there is none, or its module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise UserError(f"--model {name} must be package.module:factory, a Python module's name and a function's or class's in it")
    here = str(Path.cwd())
    if here not in sys.path:
        # Last, so that nothing in the current folder hides an installed package.
        sys.path.append(here)
    # A folder that was filled after Python had looked into it.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--model {name}: the module {module_name} cannot be imported ({_reason(error)}): correct it, or start where it is found, in "
            "its folder or with PYTHONPATH"
        ) from None
    factory = getattr(module, attribute, None)
    if factory is None:
        public = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(
            f"--model {name}: {module_name} has no {attribute}{suggestion(attribute, public) or ': name a function or class of it'}"
        )
    if not callable(factory):
        raise UserError(f"--model {name}: {attribute} is a {type(factory).__name__}: name a function or class that returns a model")
    found: Callable[..., Any] = factory
    return found


def build(name: str, in_channels: int, size: tuple[int, int], num_classes: int) -> nn.Module:
    """What the factory returns, called with those of `in_channels`, `size` or `image_size`, and `num_classes` that it takes.

    Args:
        name: see `find`.
        in_channels: C of the images.
        size: (height, width) of the images, pixels.
        num_classes: outputs.

    Raises:
        UserError: it cannot be found, needs something else, fails, or returns no nn.Module.
    """
    factory = find(name)
    given = {"in_channels": in_channels, "size": size, "image_size": size, "num_classes": num_classes}
    try:
        taken = inspect.signature(factory).parameters.values()
    except ValueError:
        raise UserError(f"--model {name} does not tell its arguments: name a Python function or class") from None
    needed = [
        parameter.name
        for parameter in taken
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.name not in given or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if needed:
        raise UserError(
            f"--model {name} needs {', '.join(needed)}: it is called with in_channels, size (or image_size) and num_classes, as far as it "
            "takes them by name; give the others defaults"
        )
    keywords = [parameter.name for parameter in taken if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        keywords += ["in_channels", "num_classes", *(["size"] if "image_size" not in keywords else [])]
    try:
        module = factory(**{word: value for word, value in given.items() if word in keywords})
    except Exception as error:
        raise UserError(f"--model {name} fails ({_reason(error)}): correct it") from None
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {name} returns a {type(module).__name__}: let it return a torch.nn.Module")
    return module


def _reason(error: BaseException) -> str:
    """Kind and text of an exception of the user's code, and where it was raised."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename and frame.filename != __file__
    ]
    place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
