"""Losses and gradients that are not finite: seen without waiting for the device, and always before a checkpoint."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """Which samples an update was made of.

    Attributes:
        epoch: counted from 0.
        step: finished updates before it.
        start, size: its samples' place in the order of the epoch, over all ranks.
    """

    epoch: int
    step: int
    start: int
    size: int


@dataclass(frozen=True)
class Finding:
    """An update that is not finite on this rank; `loss` is the mean of its micro-batches' losses, `grad_norm` None where not computed."""

    update: Update
    loss: float
    grad_norm: float | None
    reason: str


class Finite:
    """Notes the first update whose loss or gradient norm is not finite.

    On a GPU the numbers are copied beside the computation and read when they have arrived, some updates later; on a CPU at once.

    Attributes:
        finding: what was found; None while all is well.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.finding: Finding | None = None
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # Stays 1 once something is found: only the first finding counts.
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._waiting: deque[tuple[Update, Tensor, bool, Any]] = deque()

    def see(self, update: Update, losses: list[Tensor], gradient: list[Tensor], norm: Tensor | None = None) -> None:
        """Look at an update's losses, one for each micro-batch, (), and at its gradient, or only at `norm` where that is known.

        By GradScaler's own operator with a scale of 1, which leaves every number as it is: one pass, one number to read.
        """
        found = self._found
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*losses, *(gradient if norm is None else [norm])):
            groups.setdefault(tensor.dtype, []).append(tensor)
        for group in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, self._one)
        if self.device.type == "cpu":
            if found:
                self._judge(update, [float(loss) for loss in losses], float(norm) if norm is not None else None)
            return
        numbers = torch.stack([number.float() for number in (found, *losses, *([] if norm is None else [norm]))])
        copy = torch.empty(numbers.shape, dtype=torch.float32, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._waiting.append((update, copy, norm is not None, arrived))
        while self._waiting and self._waiting[0][-1].query():
            self._read()

    def flush(self) -> None:
        """Look at what has not arrived yet; waits for the device."""
        while self._waiting:
            self._waiting[0][-1].synchronize()
            self._read()

    def _read(self) -> None:
        update, copy, has_norm, _ = self._waiting.popleft()
        found, *numbers = copy.tolist()
        norm = numbers.pop() if has_norm else None
        if found:
            self._judge(update, numbers, norm)

    def _judge(self, update: Update, losses: list[float], norm: float | None) -> None:
        total = sum(losses)
        wrong = "the gradient norm" if math.isfinite(total) else "the loss"
        self.find(Finding(update, total / len(losses), norm, f"{wrong} is not finite"))

    def find(self, finding: Finding) -> None:
        """Keep the first finding only: what follows it is its consequence."""
        self.finding = self.finding or finding


def first_bad_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a value that is not finite; None when all are. Waits for the device."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    if not names:
        return None
    # A sum is not finite when a value is not; it may overflow, which the second look tells.
    sums = torch.stack([tensors[name].detach().double().sum() for name in names]).isfinite().tolist()
    return next((name for name, fine in zip(names, sums, strict=True) if not fine and not bool(tensors[name].isfinite().all())), None)
