"""A new order of the samples in every epoch, the same on all ranks."""

from trainer.hooks.base import Hook
from trainer.state import Run


class SetEpoch(Hook):
    """Tells the prepared loader its epoch before every epoch, as the tutorials' `train_sampler.set_epoch(epoch)`.

    Accelerate counts epochs by itself, but only those whose loader was exhausted, and from 0 in every process that starts. An epoch that
    was interrupted goes on behind its last update: a position, nothing is read and thrown away.
    """

    def on_epoch_start(self, run: Run) -> None:
        run.sampler.start = run.state.consumed
        run.train_loader.set_epoch(run.state.epoch)
