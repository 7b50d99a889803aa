"""When a checkpoint is written."""

from trainer.agreement import await_checkpoint, settle
from trainer.checkpoint import CHECKPOINTS, save
from trainer.hooks.base import Hook, HookList
from trainer.state import Run


class Checkpoints(Hook):
    """Writes one after `checkpointing_steps` updates or each epoch, when the run is interrupted, and when it ends; never the same twice.

    Args:
        others: the other hooks, whose states go into it. This one comes after them, so that they have seen what it saves.
    """

    def __init__(self, others: tuple[Hook, ...]) -> None:
        self.others = HookList(others)
        self.saved: tuple[int, ...] = ()
        self.ended_inside = False

    def on_fit_start(self, run: Run) -> None:
        if run.checkpoint is not None and run.checkpoint.parent.resolve() == (run.output_dir / CHECKPOINTS).resolve():
            self.saved = self.position(run)
        self.look(run)

    def on_step_end(self, run: Run) -> None:
        every, step = run.config.checkpointing_steps, run.state.step
        self.look(run)
        if self.ended_inside or (isinstance(every, int) and step % every == 0):
            self.save(run)

    def on_epoch_end(self, run: Run) -> None:
        if run.config.checkpointing_steps == "epoch" and not self.ended_inside:
            self.save(run)

    def on_interrupt(self, run: Run) -> None:
        self.save(run)
        await_checkpoint(run)

    def on_fit_end(self, run: Run) -> None:
        if not self.ended_inside:
            self.save(run)
        await_checkpoint(run)

    def look(self, run: Run) -> None:
        """An epoch that max_steps ends inside is evaluated and counted, but a resume with more steps goes on inside it."""
        consumed = run.state.consumed
        self.ended_inside = run.max_steps_done and consumed > 0 and run.plan.rest(consumed).micro_batches > 0

    def save(self, run: Run) -> None:
        """A collective, also where it does not write."""
        settle(run)
        if self.position(run) != self.saved:
            save(run, self.others.state_dict() if run.is_main else {})
            self.saved = self.position(run)

    @staticmethod
    def position(run: Run) -> tuple[int, ...]:
        state = run.state
        return state.epoch, state.step, state.consumed, state.skipped
