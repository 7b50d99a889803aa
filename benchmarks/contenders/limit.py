"""The limit: a bare loop over images that lie decoded in memory, in the fastest memory format, with the fused optimizer. No framework.

What no trainer on this machine can beat with this model; its evaluation is the forward pass alone.
"""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from convnet import ConvNet
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import Tensor
from torchvision.datasets import MNIST


def decoded(root: str, train: bool) -> tuple[Tensor, Tensor]:
    """Normalised float (N, 1, 28, 28), channels last, and class numbers (N,)."""
    data = MNIST(root, train=train)
    images = (data.data[:, None].float() / 255 - 0.1307) / 0.3081
    return images.contiguous(memory_format=torch.channels_last), data.targets


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
        model.train()
        record.train_start()
        for batch in torch.randperm(len(images)).split(arguments.batch_size):
            with autocast:
                logits = model(images[batch])
            F.cross_entropy(logits.float(), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if last := record.step(len(batch)):
                break
        record.train_end()
        model.eval()
        start, logits = time.perf_counter(), []
        with torch.inference_mode(), autocast:
            logits = [model(some) for some in test_images.split(EVAL_BATCH_SIZE)]
        seconds = time.perf_counter() - start
        right = int((torch.cat(logits).argmax(1) == test_labels).sum())
        record.evaluated(100 * right / len(test_labels), len(test_labels), seconds)
        if last:
            break
    torch.save(model.state_dict(), Path(arguments.output_dir) / "model.pt")
    record.save()


if __name__ == "__main__":
    main()
