"""Everything that an evaluation says, from one confusion matrix and summed losses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Totals:
    """Sums over the images of an evaluation, on the device, without waiting for it.

    Attributes:
        confusion: int64 (classes, classes); row = true class, column = predicted class.
        in_top5: images whose class is among the five likeliest, int64 ().
        loss: sum of the images' losses, float64 ().
    """

    confusion: Tensor
    in_top5: Tensor
    loss: Tensor

    @classmethod
    def zeros(cls, classes: int, device: torch.device) -> "Totals":
        return cls(
            torch.zeros(classes, classes, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def add(self, labels: Tensor, predictions: Tensor, in_top5: Tensor, losses: Tensor) -> None:
        """Count a batch: `labels` and `predictions` int64 (B,), `in_top5` bool (B,), `losses` float (B,)."""
        classes = len(self.confusion)
        self.confusion += torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes)
        self.in_top5 += in_top5.sum()
        self.loss += losses.double().sum()

    def metrics(self) -> dict[str, Any]:
        """`acc1`, `acc5` in percent, `loss` mean, `samples`, `confusion` rows as lists."""
        samples = int(self.confusion.sum())
        return {
            "acc1": 100 * int(self.confusion.diagonal().sum()) / samples,
            "acc5": 100 * int(self.in_top5) / samples,
            "loss": float(self.loss) / samples,
            "samples": samples,
            "confusion": self.confusion.tolist(),
        }
