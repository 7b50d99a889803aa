"""A model of one's own: `package.module:factory`, a function or a class."""

import inspect

from torch import nn

from trainer.named import find, reason
from trainer.runtime import UserError


def build(name: str, in_channels: int, size: tuple[int, int], num_classes: int) -> nn.Module:
    """What the factory returns, called with those of `in_channels`, `size` or `image_size`, and `num_classes` that it takes.

    Args:
        name: see `named.find`.
        in_channels: C of the images.
        size: (height, width) of the images, pixels.
        num_classes: outputs.

    Raises:
        UserError: it cannot be found, needs something else, fails, or returns no nn.Module.
    """
    factory = find("--model", name)
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
        raise UserError(f"--model {name} fails ({reason(error)}): correct it") from None
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {name} returns a {type(module).__name__}: let it return a torch.nn.Module")
    return module
