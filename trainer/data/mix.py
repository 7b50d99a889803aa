"""Mixup and CutMix: training images, and with them their labels, mixed in pairs within a process's batch, on the model's device."""

import math
from dataclasses import dataclass

import numpy
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Mixture:
    """How a batch is mixed: image i with image i - 1, the first with the last; in the order of an epoch, neighbours are random pairs.

    Attributes:
        share: what is left of each image, and the weight of its own label, 0..1; the rest is its partner's.
        box: (top, bottom, left, right), pixels, ends excluded: what comes from the partner (CutMix); None: all pixels are blended (mixup).
    """

    share: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: Tensor) -> Tensor:
        """float (B, C, H, W) -> the mixed ones."""
        partners = images.roll(1, 0)
        if self.box is None:
            return images * self.share + partners * (1 - self.share)
        top, bottom, left, right = self.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
        return mixed

    def loss(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy, (), of logits (B, classes) with the labels, int64 (B,), and their partners', each by its share."""
        own = cross_entropy(logits, labels, label_smoothing=label_smoothing)
        theirs = cross_entropy(logits, labels.roll(1, 0), label_smoothing=label_smoothing)
        return own * self.share + theirs * (1 - self.share)


def draw_mixture(mixup: float, cutmix: float, size: tuple[int, int], seed: int) -> Mixture:
    """The mixture that `seed` leads to; no other generator is touched.

    mixup: share ~ Beta(alpha, alpha) (Zhang et al. 2018). CutMix: such a share decides the size of a box of the image's proportions, whose
    centre is drawn evenly over the image; what of it lies outside is cut off, and the share is then that of the pixels (Yun et al. 2019).

    Args:
        mixup, cutmix: the alphas; 0 leaves it out. With both, each is drawn half of the times.
        size: (height, width) of the images, pixels.
    """
    generator = numpy.random.default_rng(seed)
    cut = generator.random() < (0.5 if mixup else 1.0) if cutmix else False
    alpha = cutmix if cut else mixup
    share = float(generator.beta(alpha, alpha))
    if not cut:
        return Mixture(share)
    edges = []
    for length in size:
        half, centre = int(length * math.sqrt(1 - share)) // 2, int(generator.integers(length))
        edges += [max(0, centre - half), min(length, centre + half)]
    top, bottom, left, right = edges
    return Mixture(1 - (bottom - top) * (right - left) / (size[0] * size[1]), (top, bottom, left, right))
