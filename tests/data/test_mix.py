"""Mixup and CutMix against a few lines of PyTorch."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import alone_run, largest_difference, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from trainer.data.mix import Mixture, draw_mixture
from trainer.data.sampler import EpochSampler
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes
from trainer.seeding import derive_seed
from trainer.state import Run


def draws(mixup: float, cutmix: float, count: int = 4000, size: tuple[int, int] = (24, 40)) -> list[Mixture]:
    return [draw_mixture(mixup, cutmix, size, derive_seed(0, "test", number)) for number in range(count)]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixups_share_is_beta(alpha: float) -> None:
    shares = numpy.array([mixture.share for mixture in draws(alpha, 0.0)])
    assert all(mixture.box is None for mixture in draws(alpha, 0.0, 10))
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)
    assert shares.min() >= 0
    assert shares.max() <= 1


def test_cutmixs_share_is_that_of_the_pixels_and_its_box_inside() -> None:
    mixtures = draws(0.0, 1.0)
    for mixture in mixtures:
        assert mixture.box is not None
        top, bottom, left, right = mixture.box
        assert 0 <= top <= bottom <= 24
        assert 0 <= left <= right <= 40
        assert mixture.share == pytest.approx(1 - (bottom - top) * (right - left) / (24 * 40), abs=1e-15)
    boxes = numpy.array([mixture.box for mixture in mixtures])
    covered = numpy.zeros((24, 40))
    for top, bottom, left, right in boxes:
        covered[top:bottom, left:right] += 1
    # A box's area before cutting off is 1/2 in the mean, a little less in whole pixels; at a border half of the boxes lie outside.
    assert covered[12, 20] / len(boxes) == pytest.approx(0.46, abs=0.04)
    assert 0.3 < covered[0, 20] / covered[12, 20] < 0.7
    assert numpy.median((boxes[:, 3] - boxes[:, 2]) / (boxes[:, 1] - boxes[:, 0]).clip(1)) == pytest.approx(40 / 24, rel=0.25)
    uncut = [m for m, (top, bottom, left, right) in zip(mixtures, boxes, strict=True) if top and left and bottom < 24 and right < 40]
    assert len(uncut) > 400


def test_with_both_each_is_drawn_half_of_the_times() -> None:
    cut = [mixture.box is not None for mixture in draws(0.2, 1.0)]
    assert sum(cut) / len(cut) == pytest.approx(0.5, abs=0.03)


def test_the_seed_alone_decides_and_no_generator_is_touched() -> None:
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert draws(0.2, 1.0, 50) == draws(0.2, 1.0, 50)
    assert len({mixture.share for mixture in draws(0.2, 1.0, 50)}) > 40
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert random.getstate() == before[2]


@pytest.mark.parametrize("alpha", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_alphas_give_shares_all_the_same(alpha: float) -> None:
    for mixture in (*draws(alpha, 0.0, 20), *draws(0.0, alpha, 20, (1, 1))):
        assert 0 <= mixture.share <= 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_and_loss_by_hand(memory_format: Any) -> None:
    images = torch.rand(5, 3, 6, 8).to(memory_format=memory_format)
    kept, labels, logits = images.clone(), torch.tensor([3, 1, 0, 2, 2]), torch.randn(5, 4)
    for mixture in (Mixture(0.3), Mixture(1 - 2 * 5 / 48, (1, 3, 2, 7))):
        mixed = mixture.images(images)
        for i in range(5):
            one, other = images[i], images[i - 1]
            expected = 0.3 * one + 0.7 * other
            if mixture.box is not None:
                expected = one.clone()
                expected[:, 1:3, 2:7] = other[:, 1:3, 2:7]
            torch.testing.assert_close(mixed[i], expected)
        assert torch.equal(images, kept)
        assert mixed.is_contiguous(memory_format=memory_format)
        # PyTorch's cross-entropy takes probabilities for labels too.
        own, theirs = F.one_hot(labels, 4), F.one_hot(labels[[4, 0, 1, 2, 3]], 4)
        blended = mixture.share * own + (1 - mixture.share) * theirs
        for smoothing in (0.0, 0.2):
            expected = F.cross_entropy(logits, blended, label_smoothing=smoothing)
            torch.testing.assert_close(mixture.loss(logits, labels, smoothing), expected)


KNOBS: dict[str, Any] = {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}
PLAIN: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 0.0,
    "lr_scheduler": "constant",
    "warmup_epochs": 0,
    "cpu_threads": 1,
}


def bare_loop(run: Run, epochs: int, knobs: dict[str, Any]) -> ConvNet:
    torch.manual_seed(derive_seed(3, "init"))
    model = ConvNet(1, (8, 8), 10).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    (mean,), (std,), data = run.data.mean, run.data.std, run.data.train
    sampler = EpochSampler(len(data), 3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = sampler.order()
        for start in range(0, len(data), 16):
            images, labels = data.__getitems__(order[start : start + 16])[:2]
            x = (images.float() / 255 - mean) / std
            if knobs["mixup"] or knobs["cutmix"]:
                mixture = draw_mixture(knobs["mixup"], knobs["cutmix"], (8, 8), derive_seed(3, "mix", epoch, start, 0))
                partner = torch.arange(len(x)) - 1
                if mixture.box is None:
                    x = x * mixture.share + x[partner] * (1 - mixture.share)
                else:
                    top, bottom, left, right = mixture.box
                    mask = torch.zeros(8, 8, dtype=torch.bool)
                    mask[top:bottom, left:right] = True
                    x = torch.where(mask, x[partner], x)
                logits, smoothing = model(x), knobs["label_smoothing"]
                loss = mixture.share * F.cross_entropy(logits, labels, label_smoothing=smoothing) + (1 - mixture.share) * F.cross_entropy(
                    logits, labels[partner], label_smoothing=smoothing
                )
            else:
                loss = F.cross_entropy(model(x), labels, label_smoothing=knobs["label_smoothing"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("off", [(), ("mixup", "cutmix")])
def test_training_equals_a_bare_loop_bit_for_bit(tmp_path: Path, off: tuple[str, ...]) -> None:
    knobs = KNOBS | dict.fromkeys(off, 0.0)
    folder = write_ids(tmp_path / "ids", train=89)
    with alone_run(folder, batch_size=16, lr=0.05, epochs=2, seed=3, output_dir=str(tmp_path / "out"), **PLAIN, **knobs) as run:
        fit(run, needed_hooks())
        trained, expected = tensors(run.module), tensors(bare_loop(run, 2, knobs))
    for name, tensor in trained.items():
        assert torch.equal(tensor, expected[name]), name


def gradient(processes: Processes, folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """What the first epoch's updates, all of rate 1, take away from a linear model's weights in float64; and each rank's images."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        run = make_run(processes, folder, model, output_dir=f"out{processes.rank}", epochs=1, lr=1.0, **{**PLAIN, "momentum": 0.0, **knobs})
        before = tensors(model)
        fit(run, needed_hooks())
        after = tensors(model)
        run.train_loader.set_epoch(0)
        batches = [(run.normalize(batch[0]), batch[1]) for batch in run.train_loader]
        return {"before": before, "after": after, "batches": batches}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("accumulation", "images"), [(1, 16), (2, 29)])
def test_every_image_of_two_ranks_counts_the_same(two_ranks: Ranks, tmp_path: Path, accumulation: int, images: int) -> None:
    """Each rank mixes its own images; with unequal last batches too, the gradient is that of the mean over all images of the update."""
    folder = write_ids(tmp_path / "ids", train=images)
    knobs = KNOBS | {"batch_size": 8, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    both = two_ranks.run(gradient, folder, knobs)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    model.load_state_dict(both[0]["before"])
    total = torch.zeros((), dtype=torch.float64)
    mixtures = set()
    for rank in range(2):
        for micro, (x, labels) in enumerate(both[rank]["batches"]):
            mixture = draw_mixture(0.4, 1.0, (8, 8), derive_seed(0, "mix", 0, 16 * micro, rank))
            mixtures.add(mixture)
            total = total + mixture.loss(model(mixture.images(x)), labels, 0.1) * len(labels)
    (total / images).backward()
    expected = {
        name: both[0]["before"][name] - parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    for rank in range(2):
        assert largest_difference(both[rank]["after"], expected) < 1e-12
    assert len(mixtures) == 2 * accumulation, "each rank and micro-batch has its own"


def first_batches(processes: Processes, folder: Path, knobs: dict[str, Any]) -> list[Tensor]:
    """What the model is given, evaluation included."""
    seen: list[Tensor] = []

    class Eye(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 10)

        def forward(self, images: Tensor) -> Tensor:
            seen.append(images.clone())
            output: Tensor = self.net(images.flatten(1))
            return output

    run = make_run(processes, folder, Eye(), epochs=2, batch_size=16, output_dir="out", cpu_threads=1, **knobs)
    fit(run, needed_hooks())
    return seen


def test_evaluation_sees_plain_images_and_every_epoch_other_mixtures(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=32, test=8)
    mixed, plain = alone(first_batches, folder, KNOBS), alone(first_batches, folder, {})
    assert [len(batch) for batch in mixed] == [16, 16, 8, 16, 16, 8]
    assert [torch.equal(a, b) for a, b in zip(mixed, plain, strict=True)] == [False, False, True, False, False, True]
    assert mixed[0].mean() == pytest.approx(float(plain[0].mean()), abs=0.2)


def test_a_batch_of_one_is_its_own_partner() -> None:
    image, label, logits = torch.rand(1, 1, 8, 8), torch.tensor([2]), torch.randn(1, 4)
    for mixture in (Mixture(0.3), Mixture(0.75, (0, 4, 0, 4))):
        torch.testing.assert_close(mixture.images(image), image)
        torch.testing.assert_close(mixture.loss(logits, label), F.cross_entropy(logits, label))
