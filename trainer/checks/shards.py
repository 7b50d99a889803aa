"""The ranks' shares of an epoch are disjoint, and together the whole train split."""

from collections import Counter
from itertools import chain
from typing import Any

from torch.utils.data import RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from trainer.checks.base import Result, Subject, quantity
from trainer.checks.loaders import is_iterable, keys, length
from trainer.checks.preserve import parts


def check(subject: Subject) -> Result:
    """Epoch 0 of the real loader, reading indices instead of images.

    Allowed are what loaders do so that all ranks get as many batches: samples repeated to fill the last batches up, and, with drop_last
    or fewer left than processes, samples left out.
    """
    loader = subject.train_loader
    if is_iterable(loader):
        return Result("SKIPPED", "an iterable data set has no indices to compare")
    if any(isinstance(part, WeightedRandomSampler) or (isinstance(part, RandomSampler) and part.replacement) for part in parts(loader)):
        return Result("SKIPPED", "the sampler draws with replacement")
    if subject.start_epoch is not None:
        start = subject.start_epoch
        subject.each(lambda: start(0))
    dealt = subject.each(lambda: [[subject.index_of(key) for key in batch] for batch in keys(loader)])
    samples, count = length(loader), subject.count
    times = Counter(chain(*chain(*dealt)))
    missing = samples - len(times.keys() & set(range(samples)))
    repeats = times.total() - len(times)
    batches = [len(rank) for rank in dealt]
    largest = max((len(batch) for batch in chain(*dealt)), default=1)
    if len(set(batches)) > 1:
        return Result(
            "FAIL", f"the ranks get {', '.join(map(str, batches))} batches: the one with more waits for ever; use even_batches or drop_last"
        )
    drops = any(getattr(part, "drop_last", False) for part in parts(loader))
    may_miss = samples % (count * largest) if drops else samples % count
    may_repeat = -samples % (count * largest)
    if missing > may_miss or repeats > may_repeat:
        return Result("FAIL", _fault(subject, dealt, samples, missing, repeats))
    notes = [f"{missing} left out"] * (missing > 0) + [f"{repeats} repeated to fill up the last batches"] * (repeats > 0)
    shares = sorted({sum(map(len, rank)) for rank in dealt})
    return Result(
        "PASS",
        f"{quantity(samples, 'sample')} dealt out to {quantity(count, 'rank')}, {' or '.join(f'{share:,}' for share in shares)} each"
        + "".join(f"; {note}" for note in notes or ["none twice"]),
    )


def _fault(subject: Subject, dealt: list[list[list[Any]]], samples: int, missing: int, repeats: int) -> str:
    shares = [set(chain(*rank)) for rank in dealt]
    text = f"{missing:,} of {samples:,} samples reach no rank, {repeats:,} come more than once"
    if subject.count > 1 and all(share == shares[0] for share in shares):
        return f"{text}: every rank gets the same; use accelerator.prepare(loader) or a DistributedSampler"
    if type(subject.train_loader).__module__.startswith("accelerate") and any(
        isinstance(p, DistributedSampler) for p in parts(subject.train_loader)
    ):
        return f"{text}: a DistributedSampler is sharded a second time by accelerator.prepare; leave it out"
    return f"{text}: the order must be the same on all ranks, from a seed that all share, and be cut into shares once"
