"""The end of a run that has a limited time."""

import time

from torch import Tensor

from trainer.config import seconds
from trainer.hooks.base import Hook
from trainer.state import Run
from trainer.stops import MAX_TIME


class MaxTime(Hook):
    """Asks for a stop, with a checkpoint, when `max_time` has passed since the processes met, by the main process's clock."""

    def on_fit_start(self, run: Run) -> None:
        limit = run.config.max_time if run.is_main else None
        self.end = run.processes.started + seconds(limit) if limit is not None else None

    def on_step_end(self, run: Run) -> None:
        self.judge(run)

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        self.judge(run)

    def judge(self, run: Run) -> None:
        if self.end is not None and time.monotonic() >= self.end:
            run.processes.stops.request(MAX_TIME)
