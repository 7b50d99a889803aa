"""What is inspected (Subject), what a check says (Result), and how a check is run so that a fault on one rank hangs nobody."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.checks.preserve import Snapshot
from trainer.runtime import CONTROL_TIMEOUT, Processes

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a check says.

    Attributes:
        measured: one plain phrase; on FAIL and WARN what is wrong and how to mend it, on SKIPPED the reason.
    """

    status: Literal["PASS", "WARN", "FAIL", "SKIPPED"]
    measured: str


class RankError(Exception):
    """A step of a check failed on some rank; raised on all ranks alike."""


@dataclass(frozen=True)
class Images:
    """A split whose images can be opened one by one.

    Attributes:
        open: reads image number i, and raises when it cannot be read.
    """

    name: str
    count: int
    open: Callable[[int], Any]


@dataclass(kw_only=True)
class Subject:
    """A training to inspect; whatever is None is skipped.

    Attributes:
        processes: all ranks, with a gloo group that nothing but the checks' messages goes through, see `messengers`.
        device: where this rank computes.
        model: as the training calls it: prepared, wrapped.
        scaler: the GradScaler; None without one.
        precision: what was asked for: 'no', 'fp16' or 'bf16'; None when that is not known.
        forward: (model, batch) -> (logits (B, classes), labels (B,)), with what the training does before, for example autocast.
        loss: (logits, labels) -> mean loss.
        start_epoch: what the training calls before epoch n; None when it calls nothing.
        train_step: one update on one batch of train_loader, as the training does it.
        evaluate: the training's evaluation; returns (images classified right, images counted) or also the mean loss, None on ranks that
            do not know. Every rank calls it.
        save: writes a checkpoint into the folder it is given. Every rank calls it.
        resumed: trains, saves into the folder, which all ranks share, trains on; then builds anew, loads, trains on. Yields the state of
            both, by name, and None after each step before them that can fail on one rank alone.
        index_of: what the train loader's sampler yields -> the sample's index.
        seeded_by_sample: for a data set that seeds its augmentation by sample: a copy of it with this transform.
        images: the splits that `readable data` opens.
        skips_bad: the training leaves out images that cannot be read.
        folder: where checkpoints go; temporary folders of the checks are made inside.
        checkpoints: how many checkpoints will lie there at once.
        tolerance: how far gradients may be from the mean over the ranks, as a share of it; for those that are rounded on their way.
        averages: bytes of averaged weights in each of them.
        absent: why something is None.
        eval_note: which images of the test split these are, where they are not all.
        out_of_step: the check that left the ranks with different numbers of collectives behind them.
        failure: what failed on this rank, until the others know.
    """

    processes: Processes
    device: torch.device
    model: nn.Module | None = None
    optimizer: Any = None
    train_loader: Any = None
    eval_loader: Any = None
    accelerator: Any = None
    scaler: Any = None
    precision: str | None = None
    forward: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    start_epoch: Callable[[int], Any] | None = None
    train_step: Callable[[Any], Any] | None = None
    evaluate: Callable[[], Sequence[float] | None] | None = None
    save: Callable[[Path], Any] | None = None
    resumed: Callable[[Path], Iterator[dict[str, Tensor] | None]] | None = None
    index_of: Callable[[Any], int] = int
    seeded_by_sample: Callable[[Callable[[Tensor], Tensor]], Any] | None = None
    images: tuple[Images, ...] | None = None
    skips_bad: bool = False
    folder: Path
    checkpoints: int = 1
    tolerance: float = 1e-3
    averages: int = 0
    absent: str = "not given"
    eval_note: str = ""
    out_of_step: str | None = field(default=None, init=False)
    failure: str | None = field(default=None, init=False)

    @property
    def rank(self) -> int:
        return self.processes.rank

    @property
    def count(self) -> int:
        return self.processes.count

    @property
    def module(self) -> nn.Module:
        """The plain model inside DDP and torch.compile."""
        assert self.model is not None
        return unwrap(self.model)

    def each(self, work: Callable[[], T]) -> list[T]:
        """`work()` of each rank, in rank order, on every rank. A collective; whatever a rank alone knows or can fail at happens inside.

        What can fail on one rank alone, such as reading images, is not in one `work` with collectives, in which the others would hang.

        Raises:
            RankError: `work` failed on some rank; on every rank, with the first one's message.
        """
        outcome: tuple[T | None, str | None]
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self.failure = outcome[1]
        outcomes = self.processes.all_gather(outcome)
        self.failure = None
        failures = {rank: message for rank, (_, message) in enumerate(outcomes) if message is not None}
        if failures:
            first = min(failures)
            same = [rank for rank, message in failures.items() if message == failures[first]]
            raise RankError(f"{name_ranks(same, self.count)}: {failures[first]}")
        values: list[Any] = [value for value, _ in outcomes]
        return values


def unwrap(model: nn.Module) -> nn.Module:
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper around a model, inside torch.compile or not."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return model


def name_ranks(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == count:
        return "every rank" if count > 1 else "the process"
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(str(rank) for rank in ranks[:8])}{' …' * (len(ranks) > 8)}"


def quantity(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@contextmanager
def messengers() -> Iterator[Processes]:
    """All ranks of the group that has been joined, by whomever, with a gloo group of their own inside the block. A collective."""
    joined = dist.is_initialized()
    state: Any = SimpleNamespace(process_index=dist.get_rank() if joined else 0, num_processes=dist.get_world_size() if joined else 1)
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if joined else None
    try:
        yield Processes(state, control)
    finally:
        if control is not None:
            dist.destroy_process_group(control)


@contextmanager
def temporary_folder(subject: Subject) -> Iterator[Path]:
    """A folder of this rank's own inside `subject.folder`, gone after the block. A collective.

    Raises:
        RankError: it cannot be made on some rank.
    """
    made: list[Path] = []
    try:
        subject.each(lambda: made.append(Path(tempfile.mkdtemp(prefix=f".doctor-rank{subject.rank}-", dir=existing(subject.folder)))))
        yield made[0]
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        run: the same on every rank, with rank-dependent work inside `Subject.each` only, so that all ranks come to the same result.
        needs: fields of Subject without which it is skipped.
    """

    name: str
    run: Callable[[Subject], Result]
    needs: tuple[str, ...] = ()


def examine(check: Check, subject: Subject, before: Snapshot) -> Result:
    """The check's result; afterwards everything is as in `before`. A collective.

    A check that leaves the ranks with different numbers of collectives behind them fails, and later ones are skipped: their collectives
    would pair up wrongly.
    """
    if subject.out_of_step is not None:
        return Result("SKIPPED", f"the ranks are out of step since '{subject.out_of_step}'")
    missing = subject.each(lambda: [need for need in check.needs if getattr(subject, need) is None])
    if any(missing):
        return Result("SKIPPED", f"{', '.join(max(missing))} {subject.absent}")
    try:
        result = check.run(subject)
    except Exception as error:
        result = Result("FAIL", str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}")
    finally:
        before.restore()
    counts = subject.each(collectives)
    if len(set(counts)) > 1:
        subject.out_of_step = check.name
        numbers = ", ".join(f"rank {rank} {number - min(counts)}" for rank, number in enumerate(counts))
        what = f"; {result.measured}" if result.status == "FAIL" else ""
        return Result(
            "FAIL",
            f"the ranks left different numbers of collectives behind (more than the others: {numbers}), which hangs sooner "
            f"or later: every rank must run the same code{what}",
        )
    return result


def collectives() -> int:
    """Collectives that this rank has started on the default group; 0 where torch does not tell."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    try:
        return int(group._get_sequence_number_for_group()) if group is not None else 0
    except (AttributeError, RuntimeError):
        return 0
