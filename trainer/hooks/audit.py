"""Ranks that should be equal are compared, so that a difference stops the run instead of spoiling it in silence."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.hooks.base import Hook
from trainer.local_sgd import averaging_due
from trainer.runtime import RunError
from trainer.seeding import GOLDEN
from trainer.state import Run


class Audit(Hook):
    """Compares a hash of each weight and its average, with SyncBN of each running statistic too, of the rate and the loss scale.

    Over all ranks, after every `audit_interval` updates (with local SGD where these are ones at which the ranks are equal), and at each
    epoch's end. (Without SyncBN, running statistics differ between two forward passes; DDP sends rank 0's at the next.)

    Raises:
        RunError: something differs; it names the tensor and the ranks. The same on all ranks.
    """

    def on_step_end(self, run: Run) -> None:
        if run.config.audit_interval and run.state.step % run.config.audit_interval == 0 and averaging_due(run):
            self.compare(run)

    def on_epoch_end(self, run: Run) -> None:
        if run.config.audit_interval:
            self.compare(run)

    def compare(self, run: Run) -> None:
        """A collective."""
        if run.processes.count == 1:
            return
        run.at("audit")
        tensors: dict[str, Tensor] = dict(run.module.named_parameters())
        if run.sync_bn_layers:
            tensors |= dict(run.module.named_buffers())
        if run.ema is not None:
            tensors |= {f"the average of {name}": average for name, average in run.ema.averages.items()}
        numbers = {"the learning rate": run.optimizer.param_groups[0]["lr"], "the loss scale": run.state.loss_scale or 0.0}
        names = [*tensors, *numbers]
        own = (*hashes(tensors), *numbers.values())
        everyone = run.processes.all_gather(own)
        for place, name in enumerate(names):
            values = [theirs[place] for theirs in everyone]
            wrong = outliers(values)
            if wrong:
                ranks = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
                raise RunError(
                    f"the ranks have drifted apart at update {run.state.step}: {name} on {ranks} differs from "
                    f"{'rank 0' if 0 not in wrong else 'the others'}; the model is not to be trusted from the checkpoint before on",
                    agreed=True,
                )


def hashes(tensors: Mapping[str, Tensor]) -> list[int]:
    """A 64-bit number for each tensor, computed where it is: another one when any of its bits is another.

    The sum, modulo 2**64, of the elements' bits times odd numbers that depend on their places: one changed element always changes it.
    """
    if not tensors:
        return []
    sums = []
    for tensor in tensors.values():
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        width = tensor.element_size()
        words = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).to(torch.int64)
        weights = (torch.arange(1, len(words) + 1, device=words.device) * GOLDEN) | 1
        sums.append((words * weights).sum())
    result: list[int] = torch.stack(sums).tolist()
    return result


def outliers(values: list[float]) -> list[int]:
    """The ranks whose value is not that of most of them; of rank 0 where no value has a majority."""
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    return [rank for rank, value in enumerate(values) if value != usual]
