"""The limit: a bare loop over images that lie decoded in memory, in the fastest memory format, with the fused optimizer. No framework.

What no trainer on this machine can beat with this model; its evaluation is the forward pass alone.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from convnet import ConvNet
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import Tensor, nn


def decoded(root: str, train: bool) -> tuple[Tensor, Tensor]:
    """Normalised float (N, 1, 28, 28), channels last, and class numbers (N,)."""
    from torchvision.datasets import MNIST

    data = MNIST(root, train=train)
    images = (data.data[:, None].float() / 255 - 0.1307) / 0.3081
    return images.contiguous(memory_format=torch.channels_last), data.targets


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, batch_size: int, autocast: torch.autocast
) -> Iterator[int]:
    """An epoch; the number of images of each step when it is done."""
    model.train()
    for batch in torch.randperm(len(images)).split(batch_size):
        with autocast:
            logits = model(images[batch])
        F.cross_entropy(logits.float(), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield len(batch)


def forward(model: nn.Module, images: Tensor, autocast: torch.autocast, batch_size: int = EVAL_BATCH_SIZE) -> tuple[Tensor, float]:
    """The logits of all images, and the seconds that they took."""
    model.eval()
    start = time.perf_counter()
    with torch.inference_mode(), autocast:
        logits = [model(some) for some in images.split(batch_size)]
    return torch.cat(logits), time.perf_counter() - start


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(arguments.seed)
    model = ConvNet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    images, labels = decoded(arguments.data, train=True)
    test_images, test_labels = decoded(arguments.data, train=False)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16)
    for _ in range(arguments.epochs):
        record.train_start()
        for size in train(model, optimizer, images, labels, arguments.batch_size, autocast):
            if last := record.step(size):
                break
        record.train_end()
        logits, seconds = forward(model, test_images, autocast)
        right = int((logits.argmax(1) == test_labels).sum())
        record.evaluated(100 * right / len(test_labels), len(test_labels), seconds)
        if last:
            break
    torch.save(model.state_dict(), Path(arguments.output_dir) / "model.pt")
    record.save()


if __name__ == "__main__":
    main()
