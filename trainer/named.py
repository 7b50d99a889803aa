"""What a user's own Python module holds, named by a flag as `package.module:name`."""

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import suggestion
from trainer.runtime import UserError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def find(flag: str, name: str) -> Callable[..., Any]:
    """The callable that `package.module:name` names; its module is imported, from the current folder too.

    Args:
        flag: what error messages begin with, for example `--model`.

    Raises:
        UserError: there is none, or its module cannot be imported.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"{flag} {name} must be package.module:factory, a Python module's name and a function's or class's in it")
    module_name, _, attribute = name.partition(":")
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
            f"{flag} {name}: the module {module_name} cannot be imported ({reason(error)}): correct it, or start where it is found, in "
            "its folder or with PYTHONPATH"
        ) from None
    found = getattr(module, attribute, None)
    if found is None:
        public = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(
            f"{flag} {name}: {module_name} has no {attribute}{suggestion(attribute, public) or ': name a function or class of it'}"
        )
    if not callable(found):
        raise UserError(f"{flag} {name}: {attribute} is a {type(found).__name__}: name a function or class")
    called: Callable[..., Any] = found
    return called


def reason(error: BaseException) -> str:
    """Kind and text of an exception of the user's code, and where it was raised."""
    trainer = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and trainer not in Path(frame.filename).parents
    ]
    place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
