"""The end of a run that no longer gets better."""

from trainer.hooks.base import Hook
from trainer.state import Run
from trainer.stops import EARLY_STOPPING


class EarlyStopping(Hook):
    """Asks for the end after `early_stopping_patience` epochs without a better accuracy; nothing to remember: the best epoch tells."""

    def on_fit_start(self, run: Run) -> None:
        self.judge(run)

    def on_epoch_end(self, run: Run) -> None:
        self.judge(run)

    def judge(self, run: Run) -> None:
        patience, best = run.config.early_stopping_patience, run.state.best
        if patience is not None and best and run.state.epoch - best["epoch"] >= patience:
            run.processes.stops.request(EARLY_STOPPING)
