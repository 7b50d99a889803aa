"""Hook: what can be done at each point of the loop. HookList: several of them, called in order."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trainer.state import Run


class Hook:
    """Methods that the loop calls on every rank; see `loop.py` for when.

    A hook may change its own attributes, the loader's epoch and generators and `state.metrics`; not weights, gradients, the config
    or other hooks. What only the main process does stands inside the hook under `if run.is_main`, with no collective in that branch.
    """

    def on_fit_start(self, run: Run) -> None: ...

    def on_epoch_start(self, run: Run) -> None: ...

    def on_step_end(self, run: Run) -> None: ...

    def on_eval_start(self, run: Run) -> None: ...

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        """Of this rank's batch `logits` (B, classes) float, `labels` (B,) int64, and `keys` (B,) int64, which are the images' indices."""

    def on_eval_end(self, run: Run) -> None: ...

    def on_epoch_end(self, run: Run) -> None: ...

    def on_interrupt(self, run: Run) -> None:
        """In place of `on_fit_end` when all ranks have agreed to stop here, to be resumed."""

    def on_fit_end(self, run: Run) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What the hook has to know after a resume: numbers, texts, true or false, or None, by name. Called on the main process."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state`, as `state_dict` gave it, before `on_fit_start`; on every rank.

        Raises:
            ValueError: its names are not the hook's.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the checkpoint has {', '.join(state)}")


class HookList:
    """Calls each hook in turn; an exception of a hook is the run's."""

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks
        # Only these are called at each update.
        self._steps = [hook for hook in hooks if getattr(hook.on_step_end, "__func__", None) is not Hook.on_step_end]

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def on_fit_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_fit_start(run)

    def on_epoch_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_epoch_start(run)

    def on_step_end(self, run: Run) -> None:
        for hook in self._steps:
            hook.on_step_end(run)

    def on_eval_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_eval_start(run)

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        for hook in self.hooks:
            hook.on_eval_batch(run, logits, labels, keys)

    def on_eval_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_eval_end(run)

    def on_epoch_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_epoch_end(run)

    def on_fit_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_fit_end(run)

    def on_interrupt(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_interrupt(run)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states of the hooks that have one, by class name."""
        return {type(hook).__name__: state for hook in self.hooks if (state := hook.state_dict())}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Give each hook its state.

        Raises:
            ValueError: a state is of no hook, or misses one.
        """
        hooks = {type(hook).__name__: hook for hook in self.hooks}
        # A hook that makes its attributes in on_fit_start has no state to ask for yet.
        missing = {name for name, hook in hooks.items() if name not in states and hook.state_dict()}
        wrong = {name for name in states if name not in hooks or type(hooks[name]).state_dict is Hook.state_dict} | missing
        if wrong:
            raise ValueError(f"the checkpoint's hooks are not those of this run: {', '.join(sorted(wrong))}")
        for name, state in states.items():
            hooks[name].load_state_dict(state)
