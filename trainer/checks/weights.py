"""All ranks start from the same weights: DDP sends rank 0's once and then only averages gradients."""

import hashlib

import torch
from torch import Tensor

from trainer.checks.base import Result, Subject, name_ranks, quantity


def check(subject: Subject) -> Result:
    """Parameters only: buffers of rank 0 are sent at each forward pass, or are each rank's own on purpose."""
    digests = subject.each(lambda: {name: digest(parameter) for name, parameter in subject.module.named_parameters()})
    for name, value in digests[0].items():
        other = [rank for rank, own in enumerate(digests) if own.get(name) != value]
        if other:
            return Result(
                "FAIL",
                f"{name} of {name_ranks(other, subject.count)} is not rank 0's: change weights before the model is wrapped, "
                "on all ranks alike",
            )
    if subject.count == 1:
        return Result("SKIPPED", "one process: nothing to compare")
    total = sum(parameter.numel() for parameter in subject.module.parameters())
    return Result(
        "PASS", f"{quantity(total, 'weight')} in {quantity(len(digests[0]), 'tensor')}, equal bit for bit on {subject.count} ranks"
    )


def digest(tensor: Tensor) -> str:
    """Of the tensor's bytes and shape."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16, key=str(tuple(tensor.shape)).encode()[:64]).hexdigest()
