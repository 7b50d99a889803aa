"""Everything that an evaluation says, from one confusion matrix and a few sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.runtime import RunError

# Equal-width bins of the probability, as Guo et al. (2017), "On Calibration of Modern Neural Networks", have them.
BINS = 15
# Wrong predictions that are kept.
MISTAKES = 16
# Images that are counted at once; batch by batch it would cost as much time as all else that is done with a small batch's logits.
COUNTED = 8192


@dataclass
class Totals:
    """Sums over the images of an evaluation, on the device, without waiting for it.

    Attributes:
        confusion: int64 (classes, classes); row = true class, column = predicted class.
        in_top5: images whose class is among the five likeliest, int64 ().
        loss: sum of the images' losses, float64 ().
        left_out: images without a label, which count nowhere else, int64 ().
        calibration: float64 (BINS, 3): images, those classified right, and the sum of the predictions' probabilities, for each of the
            bins ((m - 1) / BINS, m / BINS] of that probability.
        mistakes: float64 (MISTAKES, 4): the wrong predictions with the highest probability, the highest first, of equal ones the first to
            come: probability (-1: there is none), index, true class, predicted class.
        waiting: tables of batches that are not yet in the sums, see `add`.
    """

    confusion: Tensor
    in_top5: Tensor
    loss: Tensor
    left_out: Tensor
    calibration: Tensor
    mistakes: Tensor
    waiting: list[Tensor] = field(default_factory=list)

    @classmethod
    def zeros(cls, classes: int, device: torch.device) -> "Totals":
        return cls(
            torch.zeros(classes, classes, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(BINS, 3, dtype=torch.float64, device=device),
            torch.full((MISTAKES, 4), -1.0, dtype=torch.float64, device=device),
        )

    def add(self, table: Tensor) -> None:
        """Count a batch: float64 (B, 6), of each image its label, prediction, whether its label is among the five likeliest classes, loss,
        the logarithm of the prediction's probability, and the image's index.

        A negative label leaves an image out; then it is not among the five likeliest, and its loss 0, as torch's has it for -100.
        """
        self.waiting.append(table)
        if sum(map(len, self.waiting)) >= COUNTED:
            self._count()

    def _count(self) -> None:
        """Bring what waits into the sums."""
        if not self.waiting:
            return
        table = torch.cat(self.waiting)
        self.waiting.clear()
        classes = len(self.confusion)
        labels, predictions = table[:, 0].long(), table[:, 1].long()
        # The last bit of an exponential depends on the place in the tensor, and so on how the images were cut into batches.
        in_top5, losses, probability = table[:, 2], table[:, 3], table[:, 4].exp().float().double()
        counted = labels >= 0
        places = torch.where(counted, labels * classes + predictions, classes**2)
        self.confusion += torch.bincount(places, minlength=classes**2 + 1)[:-1].view(classes, classes)
        self.left_out += (~counted).sum()
        self.in_top5 += in_top5.sum().long()
        self.loss += losses.sum()
        right = labels == predictions
        # What is not a number makes its bin's sum none either, whichever bin that is.
        bins = (probability.nan_to_num(0.0) * BINS).ceil().long().clamp_(1, BINS) - 1
        sums = torch.stack((torch.ones_like(probability), right.double(), probability), dim=1)
        self.calibration.index_add_(0, bins, torch.where(counted[:, None], sums, 0.0))
        wrong = torch.where(counted & ~right, probability.nan_to_num(0.0), -1.0)
        candidates = torch.cat((self.mistakes, torch.stack((wrong, table[:, 5], table[:, 0], table[:, 1]), dim=1)))
        # A stable order, so that it does not depend on how the images were cut into batches.
        self.mistakes = candidates[candidates[:, 0].argsort(descending=True, stable=True)[:MISTAKES]]

    def metrics(self) -> dict[str, Any]:
        """The evaluation in plain numbers.

        `acc1`, `acc5` in percent; `loss` mean; `samples`; `bad_images` that were left out; `confusion` rows as lists; `ece`, the expected
        calibration error within 0..1: the mean, over the images, of the distance between accuracy and mean probability in their bin;
        `calibration`, for each bin its images, those classified right and the sum of their probabilities; `mistakes`, at most
        `MISTAKES` wrong predictions as (index, true class, predicted class, probability), the highest probability first.

        Raises:
            RunError: there is no image; the same on all ranks, which have gathered the same.
        """
        self._count()
        samples, left_out = int(self.confusion.sum()), int(self.left_out)
        if not samples:
            raise RunError(f"none of the {left_out} images to evaluate on can be read: replace them", agreed=True)
        return {
            "acc1": 100 * int(self.confusion.diagonal().sum()) / samples,
            "acc5": 100 * int(self.in_top5) / samples,
            "loss": float(self.loss) / samples,
            "ece": float((self.calibration[:, 1] - self.calibration[:, 2]).abs().sum()) / samples,
            "samples": samples,
            "confusion": self.confusion.tolist(),
            "calibration": [[int(images), int(right), total] for images, right, total in self.calibration.tolist()],
            "mistakes": [
                [int(index), int(true), int(predicted), probability]
                for probability, index, true, predicted in self.mistakes.tolist()
                if probability >= 0
            ],
            "bad_images": left_out,
        }


def per_class(confusion: list[list[int]]) -> list[dict[str, float | int | None]]:
    """`precision`, `recall`, `f1` within 0..1 and `support` (images) of each class, from the rows of a confusion matrix.

    A class that has images and is never predicted has precision 0. A class without images has no figure: None.
    """
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    figures: list[dict[str, float | int | None]] = []
    for number, row in enumerate(confusion):
        right, support = row[number], sum(row)
        figures.append(
            {
                "precision": right / max(1, predicted[number]) if support else None,
                "recall": right / support if support else None,
                "f1": 2 * right / (support + predicted[number]) if support else None,
                "support": support,
            }
        )
    return figures


def macro(confusion: list[list[int]]) -> dict[str, float]:
    """The means of precision, recall and F1 over the classes that have images, which weigh the same."""
    figures = [figure for figure in per_class(confusion) if figure["support"]]
    return {name: sum(figure[name] or 0.0 for figure in figures) / len(figures) for name in ("precision", "recall", "f1")}


def table(classes: Sequence[str], confusion: list[list[int]]) -> list[str]:
    """The figures of each class, and their means, as lines of text; a figure that there is not is a dash."""
    width = max(len("class"), len("macro mean"), *map(len, classes))
    rows = [f"{'class':<{width}}  precision  recall      f1  images"]
    figures: list[tuple[str, dict[str, Any]]] = list(zip(classes, per_class(confusion), strict=True))
    for name, row in [*figures, ("macro mean", {**macro(confusion), "support": sum(map(sum, confusion))})]:
        numbers = [f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("precision", "recall", "f1")]
        rows.append(f"{name:<{width}}  {numbers[0]:>9}  {numbers[1]:>6}  {numbers[2]:>6}  {row['support']:>6}")
    return rows


def named(metrics: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What results.json says beside the accuracy: the figures of each class by its name, means over classes, calibration and mistakes."""
    return {
        "ece": metrics["ece"],
        "macro": macro(metrics["confusion"]),
        "per_class": dict(zip(classes, per_class(metrics["confusion"]), strict=True)),
        "calibration": [
            {"samples": images, "accuracy": right / images if images else None, "probability": total / images if images else None}
            for images, right, total in metrics["calibration"]
        ],
        "mistakes": [
            {"index": index, "true": classes[true], "predicted": classes[predicted], "probability": probability}
            for index, true, predicted, probability in metrics["mistakes"]
        ],
        "confusion": metrics["confusion"],
    }
