"""The trainer does nothing to the numbers: fifty steps equal a bare PyTorch loop bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import alone_run, needed_hooks, tensors, write_ids
from trainer.data.dataset import ImageDataset
from trainer.data.sampler import EpochSampler
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.seeding import derive_seed

STEPS = 50


def bare_loop(data: ImageDataset, mean: float, std: float, seed: int, bf16: bool) -> ConvNet:
    torch.manual_seed(derive_seed(seed, "init"))
    model = ConvNet(1, (8, 8), 10).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    sampler, step = EpochSampler(len(data), seed), 0
    while step < STEPS:
        order = sampler.order()
        for start in range(0, len(data), 16):
            images, labels, _ = data.__getitems__(order[start : start + 16])
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model((images.float() / 255 - mean) / std)
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        sampler.set_epoch(sampler.epoch + 1)
    return model


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fifty_steps_equal_a_bare_loop_bit_for_bit(tmp_path: Path, precision: str) -> None:
    folder = write_ids(tmp_path / "ids", train=153)
    with alone_run(
        folder,
        batch_size=16,
        optimizer="sgd",
        lr=0.05,
        momentum=0.9,
        weight_decay=0.0,
        lr_scheduler="constant",
        warmup_epochs=0,
        epochs=5,
        seed=3,
        mixed_precision=precision,
        output_dir=str(tmp_path / "out"),
    ) as run:
        (mean,), (std,) = run.data.mean, run.data.std
        fit(run, needed_hooks())
        assert run.state.step == STEPS
        trained = tensors(run.module)
        expected = tensors(bare_loop(run.data.train, mean, std, 3, precision == "bf16"))
    assert trained.keys() == expected.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, expected[name]), name
