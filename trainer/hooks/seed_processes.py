"""A generator for each process, so that dropout and the like differ between ranks and epochs, and repeat in the next run."""

from trainer.hooks.base import Hook
from trainer.seeding import derive_seed, seed_process
from trainer.state import Run


class SeedProcesses(Hook):
    """Seeds torch, numpy and random of this process from (seed, epoch, rank) before every epoch.

    They drive what happens inside the model, and what worker processes draw at start. The order of the samples and their
    augmentation do not use them: those are functions of (seed, epoch) and (seed, epoch, sample). No generator is handed to the
    DataLoader: Accelerate would synchronise it over the ranks, and all of them would augment alike.
    """

    def on_epoch_start(self, run: Run) -> None:
        # Inside an epoch: for ranks that were not there before a resume; the others get their own states back.
        inside = (run.state.consumed,) if run.state.consumed else ()
        seed_process(derive_seed(run.config.seed, "process", run.state.epoch, run.processes.rank, *inside))
