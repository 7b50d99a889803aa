"""Hooks of one's own, named by `--hooks`."""

from collections.abc import Sequence

from trainer.config import Config
from trainer.hooks.base import Hook
from trainer.named import find, reason
from trainer.runtime import UserError


def build_hooks(config: Config) -> tuple[Hook, ...]:
    """What `--hooks` names, made.

    Raises:
        UserError: one cannot be found or made, or is no `Hook`.
    """
    hooks = []
    for name in [name.strip() for name in config.hooks.split(",")] if config.hooks is not None else []:
        factory = find("--hooks", name)
        try:
            hook = factory()
        except Exception as error:
            raise UserError(f"--hooks {name} cannot be made ({reason(error)}): it is called without arguments; correct it") from None
        if not isinstance(hook, Hook):
            raise UserError(f"--hooks {name} makes a {type(hook).__name__}: let it be a subclass of trainer.Hook")
        hooks.append(hook)
    return tuple(hooks)


# The trainer's own that have a state.
TAKEN = ("Log",)


def refuse_same_names(hooks: Sequence[Hook]) -> None:
    """Refuse hooks of one name that have a state: a checkpoint keeps states by class name, and would hold the last one's only.

    Raises:
        UserError: there are two, or one is named as a hook of the trainer.
    """
    names = [type(hook).__name__ for hook in hooks if type(hook).state_dict is not Hook.state_dict]
    for number, name in enumerate(names):
        if name in (*TAKEN, *names[:number]):
            raise UserError(
                f"two hooks that have a state are called {name}, and a checkpoint keeps one state of each name: rename the class of one"
            )
