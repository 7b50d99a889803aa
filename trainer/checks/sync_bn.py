"""BatchNorm takes the statistics of the images of all ranks, as one process would of the whole batch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.checks.base import Result, Subject, quantity
from trainer.models.build import batchnorm_layers
from trainer.models.sync_batchnorm import SyncBatchNorm
from trainer.seeding import derive_seed

TOLERANCE = 1e-3


def check(subject: Subject) -> Result:
    # Frozen ones normalise by their running statistics.
    layers = [layer for layer in batchnorm_layers(subject.module) if layer.weight is None or layer.weight.requires_grad]
    plain = [layer for layer in layers if not isinstance(layer, SyncBatchNorm | torch.nn.SyncBatchNorm)]
    if not layers:
        return Result("SKIPPED", "the model has no BatchNorm layer that is trained")
    if subject.count == 1:
        return Result("SKIPPED", f"one process: the {quantity(len(layers), 'layer')} see the whole batch")
    if plain:
        return Result(
            "FAIL",
            f"{len(plain)} of {quantity(len(layers), 'BatchNorm layer')} not converted: each rank normalises by its own few images; "
            "convert before the optimizer is built (main.py: leave --sync_bn at auto; torch: SyncBatchNorm.convert_sync_batchnorm)",
        )
    worst = max(max(subject.each(partial(_difference, subject, layer, number))) for number, layer in enumerate(layers))
    if not worst < TOLERANCE:
        return Result(
            "FAIL", f"the output differs by {worst:.1g} from BatchNorm over the whole batch: do all layers use the default process group?"
        )
    return Result(
        "PASS", f"{quantity(len(layers), 'layer')} converted; on random input within {worst:.1g} of BatchNorm over the whole batch"
    )


def _difference(subject: Subject, layer: _BatchNorm, number: int) -> float:
    """Largest difference of this rank's output, and of the running statistics, from those of BatchNorm over the whole batch."""
    # A different number of images, around a different mean, on each rank.
    batches = [_batch(layer, rank, number) for rank in range(subject.count)]
    device = layer.weight.device if layer.weight is not None else subject.device
    mean, variance = layer.running_mean, layer.running_var
    mean, variance = (tensor.clone() if tensor is not None else None for tensor in (mean, variance))
    momentum = layer.momentum
    if momentum is None and layer.num_batches_tracked is not None:
        momentum = 1 / (int(layer.num_batches_tracked) + 1)
    whole = torch.cat(batches).to(device)
    with torch.no_grad():
        expected = F.batch_norm(whole, mean, variance, layer.weight, layer.bias, training=True, momentum=momentum or 0.0, eps=layer.eps)
    start = sum(len(batch) for batch in batches[: subject.rank])
    with torch.no_grad():
        output = layer.train()(batches[subject.rank].to(device))
    pairs = [(output, expected[start : start + len(output)])]
    for own, other in ((layer.running_mean, mean), (layer.running_var, variance)):
        if own is not None and other is not None:
            pairs.append((own, other))
    return max(float((own - other).abs().max() / other.abs().max().clamp(min=1)) for own, other in pairs)


def _batch(layer: _BatchNorm, rank: int, number: int) -> Tensor:
    """Random, (4 or more, C, 3, 3); every rank can make every rank's."""
    generator = torch.Generator().manual_seed(derive_seed(0, "doctor", number, rank))
    dtype = layer.weight.dtype if layer.weight is not None else torch.float32
    return torch.randn(4 + rank % 3, layer.num_features, 3, 3, generator=generator, dtype=dtype) + rank
