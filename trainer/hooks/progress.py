"""A progress bar, on a terminal only."""

import sys
from typing import TYPE_CHECKING

from trainer.hooks.base import Hook
from trainer.state import Run

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress(Hook):
    """One bar over all updates, drawn by the main process below the log lines."""

    bar: "Bar | None" = None
    task: "TaskID"

    def on_fit_start(self, run: Run) -> None:
        if not run.is_main or not sys.stdout.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Log lines pass through the bar's console, which would cut long ones in two.
        self.bar = Bar(*columns, transient=True, console=Console(soft_wrap=True))
        self.task = self.bar.add_task("updates", total=run.total_steps)
        run.processes.at_exit.append(self.stop)
        self.bar.start()

    def on_step_end(self, run: Run) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=run.state.step, description=f"epoch {run.state.epoch + 1}/{run.config.epochs}")

    def on_fit_end(self, run: Run) -> None:
        self.stop()

    def stop(self, code: int = 0, reason: str = "") -> None:
        """Remove the bar; also when the run ends with an error."""
        if self.bar is not None:
            self.bar.stop()
