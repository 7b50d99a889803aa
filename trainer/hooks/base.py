"""Hook: what can be done at each point of the loop. HookList: several of them, called in order."""

from collections.abc import Iterator

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

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor) -> None:
        """`logits` (B, classes) float and `labels` (B,) int64 of this rank's batch."""

    def on_eval_end(self, run: Run) -> None: ...

    def on_epoch_end(self, run: Run) -> None: ...

    def on_fit_end(self, run: Run) -> None: ...


class HookList:
    """Calls each hook in turn; an exception of a hook is the run's."""

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def on_fit_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_fit_start(run)

    def on_epoch_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_epoch_start(run)

    def on_step_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_step_end(run)

    def on_eval_start(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_eval_start(run)

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor) -> None:
        for hook in self.hooks:
            hook.on_eval_batch(run, logits, labels)

    def on_eval_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_eval_end(run)

    def on_epoch_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_epoch_end(run)

    def on_fit_end(self, run: Run) -> None:
        for hook in self.hooks:
            hook.on_fit_end(run)
