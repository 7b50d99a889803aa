"""Evaluation over all ranks counts each sample once, and says what one process alone would say of the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainer.checks.base import Result, Subject, name_ranks
from trainer.checks.loaders import base, is_iterable, length

# Of the mean loss, relative; and the distance of two logits below which rounding may decide which is larger.
TOLERANCE = {False: 1e-4, True: 2e-2}


@dataclass(frozen=True)
class Alone:
    """One process's evaluation.

    Attributes:
        doubtful: images whose two largest logits are so near that rounding decides.
    """

    correct: int
    samples: int
    loss: float
    doubtful: int


def check(subject: Subject) -> Result:
    """The main process evaluates by itself through the plain model, in a loader of its own, while the others wait."""
    assert subject.evaluate is not None
    evaluate = subject.evaluate
    if is_iterable(subject.eval_loader):
        return Result("SKIPPED", "an iterable data set is not read here")

    def evaluated() -> tuple[tuple[float, ...] | None, int]:
        with counting(subject) as seen:
            said = evaluate()
        return _numbers(said), seen[0]

    said, seen = zip(*subject.each(evaluated), strict=True)
    alone = subject.each(lambda: _alone(subject) if subject.rank == 0 else None)[0]
    assert alone is not None
    idle = [rank for rank, images in enumerate(seen) if images == 0]
    if idle and any(seen) and alone.samples >= subject.count:
        return Result(
            "FAIL", f"{name_ranks(idle, subject.count)} evaluated no image: every rank must evaluate its share, through the same code"
        )
    if said[0] is None:
        return Result("FAIL", "evaluate() returned nothing on the main process: return (images classified right, images counted)")
    other = [rank for rank, numbers in enumerate(said) if numbers is not None and numbers[:2] != said[0][:2]]
    if other:
        return Result(
            "FAIL",
            f"rank 0 counts {_text(said[0])}, rank {other[0]} {_text(said[other[0]])}: gather or sum over all ranks before dividing",
        )
    correct, samples = said[0][:2]
    rate = f"{_text(said[0])}; one process {alone.correct} of {alone.samples}"
    if samples != alone.samples:
        return Result("FAIL", f"{rate}: count each sample once, without what fills up the last batch (gather_for_metrics cuts it off)")
    if abs(correct - alone.correct) > alone.doubtful:
        return Result("FAIL", f"{rate}: gather values for each sample, not averages of ranks, and evaluate the same weights everywhere")
    text = f"{int(samples):,} of {alone.samples:,} images{subject.eval_note} counted, {int(correct):,} right"
    if len(said[0]) > 2:
        distance = abs(said[0][2] - alone.loss) / max(abs(alone.loss), 1e-9)
        if not distance < TOLERANCE[_autocast(subject)]:
            return Result(
                "FAIL", f"mean loss {said[0][2]:.6g}, one process {alone.loss:.6g}: sum losses over samples and ranks, then divide once"
            )
        text += f", loss {alone.loss:.4f}"
    shares = " + ".join(str(images) for images in seen[:8])
    return Result(
        "PASS", f"{text}, as one process alone ({shares} through the ranks)" if subject.count > 1 else f"{text}, as counted by hand"
    )


def _numbers(said: Sequence[float] | None) -> tuple[float, ...] | None:
    return tuple(float(number) for number in said) if said is not None else None


def _text(numbers: tuple[float, ...]) -> str:
    return f"{numbers[0]:g} right of {numbers[1]:g}"


def _autocast(subject: Subject) -> bool:
    return subject.precision not in (None, "no")


@contextmanager
def counting(subject: Subject) -> Iterator[list[int]]:
    """Counts the images that go through this rank's model inside the block."""
    seen = [0]

    def count(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen[0] += next((len(value) for value in (*arguments, *options.values()) if isinstance(value, Tensor)), 0)

    handle = subject.module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def _alone(subject: Subject) -> Alone:
    module = subject.module.eval()
    inside = base(subject.eval_loader)
    # Accelerate's loader yields each rank batches of this size, torch's own too.
    size = inside.batch_size or getattr(inside.batch_sampler, "batch_size", None) or 1
    loader = DataLoader(inside.dataset, batch_size=size, collate_fn=inside.collate_fn)
    near = TOLERANCE[_autocast(subject)]
    correct = doubtful = samples = left_out = 0
    loss = 0.0
    for batch in loader:
        logits, labels = subject.forward(module, batch)
        top = logits.float().topk(min(2, logits.shape[1])).values
        doubtful += int((top[:, 0] - top[:, -1] <= near * top.abs().amax(1)).sum())
        correct += int((logits.argmax(1) == labels).sum())
        # A label of less than 0 leaves an image out, as torch's cross-entropy has it.
        counted = labels >= 0
        samples, left_out = samples + int(counted.sum()), left_out + int((~counted).sum())
        if counted.any():
            loss += float(subject.loss(logits.float()[counted], labels[counted])) * int(counted.sum())
    assert samples + left_out == length(subject.eval_loader)
    return Alone(correct, samples, loss / samples, doubtful)
