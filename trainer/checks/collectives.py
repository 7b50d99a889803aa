"""How fast the processes talk, and which one computes slowest; measured, never failed."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.checks.base import Result, Subject
from trainer.checks.loaders import first_batches

MEBIBYTES = 16


def check(subject: Subject) -> Result:
    if subject.count == 1:
        return Result("SKIPPED", "one process")
    small = torch.zeros(1, device=subject.device)
    large = torch.zeros(MEBIBYTES * 2**18, device=subject.device)
    latency = max(subject.each(lambda: _seconds(lambda: dist.all_reduce(small), 20, subject.device)))
    seconds = max(subject.each(lambda: _seconds(lambda: dist.all_reduce(large), 5, subject.device)))
    rate = MEBIBYTES / 1024 / seconds
    text = f"all_reduce of one number {latency * 1e3:.2g} ms, of {MEBIBYTES} MiB {seconds * 1e3:.3g} ms ({rate:.2g} GiB/s)"
    if subject.model is None or subject.train_loader is None:
        return Result("PASS", text)
    times = subject.each(lambda: _batch_seconds(subject))
    slowest = times.index(max(times))
    return Result(
        "PASS",
        f"{text}; forward and backward of a batch {min(times) * 1e3:.3g} to {max(times) * 1e3:.3g} ms, slowest rank {slowest}",
    )


def _batch_seconds(subject: Subject) -> float:
    """Of this rank alone: BatchNorm without the other ranks."""
    batch: Any = first_batches(subject.train_loader, 1)[0]
    module = subject.module.train()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()

    def step() -> None:
        logits, labels = subject.forward(module, batch)
        subject.loss(logits, labels).backward()

    return _seconds(step, 5, subject.device)


def _seconds(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Median of `times` runs, after one to warm up."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
