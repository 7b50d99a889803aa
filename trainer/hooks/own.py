"""Hooks of one's own, named by `--hooks`."""

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
