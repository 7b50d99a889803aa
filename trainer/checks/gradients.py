"""The gradient that a rank applies is the mean of all ranks' gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.checks.base import Result, Subject, find_ddp, name_ranks, quantity
from trainer.checks.loaders import first_batches


def check(subject: Subject) -> Result:
    """Backward through the wrapped model against the mean of backward passes through the plain one, on the same weights and batches.

    BatchNorm runs on its running statistics and dropout is off, so that a rank's own gradient is defined without the others. Rank r's
    loss is multiplied by r + 1, so that the ranks' gradients differ even where their images do not.
    """
    assert subject.model is not None
    model = subject.model
    if subject.count == 1:
        return Result("SKIPPED", "one process: nothing to average")
    batches: list[Any] = []
    subject.each(lambda: batches.extend(first_batches(subject.train_loader, 1)))
    averaged: list[Tensor] = []
    unused = subject.each(lambda: _backward(subject, model, batches[0], averaged))
    ddp = find_ddp(model)
    if ddp is not None and unused[0] and not (ddp.find_unused_parameters or ddp.static_graph):
        return Result("FAIL", f"the output does not depend on {', '.join(unused[0][:5])}, and DDP would abort: use find_unused_parameters")
    unequal, wrong = zip(*subject.each(lambda: _compare(subject, batches[0], averaged)), strict=True)
    if max(unequal) > 0:
        return Result(
            "FAIL", f"gradients differ between the ranks by {max(unequal):.1g}: is the forward pass the wrapped model's, outside no_sync()?"
        )
    if not max(wrong) < subject.tolerance:
        ranks = [rank for rank, difference in enumerate(wrong) if not difference < subject.tolerance]
        return Result("FAIL", f"on {name_ranks(ranks, subject.count)} gradients are {max(wrong):.1g} away from the mean over the ranks")
    mean = "exactly" if max(wrong) == 0 else f"within {max(wrong):.1g}"
    return Result("PASS", f"{quantity(len(averaged), 'tensor')} equal on {subject.count} ranks, and {mean} the mean of their own gradients")


def _backward(subject: Subject, model: nn.Module, batch: Any, into: list[Tensor]) -> list[str]:
    """Append each parameter's gradient; returns the names of those without."""
    model.train()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm | _DropoutNd):
            layer.eval()
    module = subject.module
    module.zero_grad()
    logits, labels = subject.forward(model, batch)
    (subject.loss(logits, labels) * (subject.rank + 1)).backward()
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    into += [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone() for _, parameter in trained]
    return [name for name, parameter in trained if parameter.grad is None]


def _compare(subject: Subject, batch: Any, averaged: list[Tensor]) -> tuple[float, float]:
    """Relative distance of this rank's gradients from the largest and smallest of all ranks', and from the mean of the ranks' own."""
    own: list[Tensor] = []
    _backward(subject, subject.module, batch, own)
    unequal = wrong = 0.0
    for gradient, mean in zip(averaged, own, strict=True):
        high, low = gradient.clone(), gradient.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(mean)
        mean /= subject.count
        size = float(mean.norm()) or 1.0
        unequal = max(unequal, float((high - low).norm()) / size)
        wrong = max(wrong, float((gradient - mean).norm()) / size)
    return unequal, wrong
