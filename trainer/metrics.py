"""Everything that an evaluation says, from one confusion matrix and summed losses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.runtime import RunError


@dataclass
class Totals:
    """Sums over the images of an evaluation, on the device, without waiting for it.

    Attributes:
        confusion: int64 (classes, classes); row = true class, column = predicted class.
        in_top5: images whose class is among the five likeliest, int64 ().
        loss: sum of the images' losses, float64 ().
        left_out: images without a label, which count nowhere else, int64 ().
    """

    confusion: Tensor
    in_top5: Tensor
    loss: Tensor
    left_out: Tensor

    @classmethod
    def zeros(cls, classes: int, device: torch.device) -> "Totals":
        return cls(
            torch.zeros(classes, classes, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def add(self, labels: Tensor, predictions: Tensor, in_top5: Tensor, losses: Tensor) -> None:
        """Count a batch: `labels` and `predictions` int64 (B,), `in_top5` bool (B,), `losses` float (B,).

        A negative label leaves an image out; its `in_top5` is then false and its loss 0, as torch's cross-entropy has it for -100.
        """
        classes = len(self.confusion)
        places = torch.where(labels < 0, classes**2, labels * classes + predictions)
        self.confusion += torch.bincount(places, minlength=classes**2 + 1)[:-1].view(classes, classes)
        self.left_out += (labels < 0).sum()
        self.in_top5 += in_top5.sum()
        self.loss += losses.double().sum()

    def metrics(self) -> dict[str, Any]:
        """`acc1`, `acc5` in percent, `loss` mean, `samples`, `confusion` rows as lists, `bad_images` that were left out.

        Raises:
            RunError: there is no image; the same on all ranks, which have gathered the same.
        """
        samples, left_out = int(self.confusion.sum()), int(self.left_out)
        if not samples:
            raise RunError(f"none of the {left_out} images to evaluate on can be read: replace them", agreed=True)
        return {
            "acc1": 100 * int(self.confusion.diagonal().sum()) / samples,
            "acc5": 100 * int(self.in_top5) / samples,
            "loss": float(self.loss) / samples,
            "samples": samples,
            "confusion": self.confusion.tolist(),
            "bad_images": left_out,
        }
