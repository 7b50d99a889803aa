"""Every epoch has an order of its own; without set_epoch a DistributedSampler repeats the first one for ever."""

from functools import partial
from itertools import chain
from typing import Any

from trainer.checks.base import Result, Subject, quantity
from trainer.checks.loaders import is_iterable, keys

# Fewer samples than this can come in the same order by chance.
FEWEST = 8


def check(subject: Subject) -> Result:
    """Epochs 0, 1 and 0 again, started as the training starts them."""
    if is_iterable(subject.train_loader):
        return Result("SKIPPED", "an iterable data set has no indices to compare")
    first, second, again = [subject.each(partial(_order, subject, epoch)) for epoch in (0, 1, 0)]
    shortest = min(map(len, first))
    if shortest < FEWEST:
        return Result("SKIPPED", f"a rank has {quantity(shortest, 'sample')} only: too few to tell")
    same = [rank for rank in range(subject.count) if first[rank] == second[rank]]
    if same:
        return Result(
            "FAIL",
            "epoch 1 has the order of epoch 0: call sampler.set_epoch(epoch), or the prepared loader's set_epoch, before every epoch (and "
            "hand that to inspect as start_epoch), and shuffle",
        )
    text = f"epochs 0 and 1 differ on {quantity(subject.count, 'rank')}"
    if subject.start_epoch is not None:
        text += (
            "; epoch 0 repeats when started again"
            if first == again
            else "; epoch 0 started again has another order: a resumed run repeats samples"
        )
    return Result("PASS", text)


def _order(subject: Subject, epoch: int) -> list[Any]:
    if subject.start_epoch is not None:
        subject.start_epoch(epoch)
    return [subject.index_of(key) for key in chain(*keys(subject.train_loader))]
