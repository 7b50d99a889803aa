"""BatchNorm over the images of all processes, on any device that torch.distributed can reduce on.

torch's own SyncBatchNorm refuses CPU tensors; this one does the same arithmetic with plain collectives, so that synchronised
statistics work, and can be tested, on two gloo processes. On CUDA torch's own is used (models/build.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.shared_gather import all_gather


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with mean and variance over all ranks' x.

    Forward combines each rank's count, mean and centred second moment (Chan, Golub, LeVeque 1979): a sum of squares would cancel in
    float32. Backward is the usual one (Ioffe and Szegedy 2015), with its two sums over all ranks. As in torch, the gradients of weight
    and bias are this rank's own; DDP averages them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        channels = x.shape[1]
        # Corrected two passes (Chan, Golub, LeVeque 1983): as exact as var_mean, which takes ten times as long on a CPU.
        mean, count = x.mean(dims, dtype=weight.dtype), x.numel() / channels
        centred = x - mean.view(shape)
        correction = centred.mean(dims)
        squares = torch.addcmul(centred.square_().sum(dims), correction, correction, value=-count)
        own = torch.stack([torch.full_like(mean, count), mean.add_(correction), squares])
        counts, means, moments = all_gather(own, group).unbind(1)
        total = counts.sum(0)
        mean = (means * counts).sum(0).div_(total)
        moment = torch.addcmul(moments, counts, (means - mean).square_()).sum(0)
        variance = moment / total
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), total)
        ctx.group = group
        ctx.mark_non_differentiable(mean, moment, total)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps), mean, moment, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *statistics: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, inverse_std, total = ctx.saved_tensors
        shape = [1, -1, *[1] * (x.dim() - 2)]
        dims = [0, *range(2, x.dim())]
        centred, wide = x - mean.view(shape), grad.to(weight.dtype)
        grad_bias = wide.sum(dims)
        grad_weight = (wide * centred).sum(dims) * inverse_std
        # Not all_reduce, which takes gloo two trips instead of one.
        mean_grad, mean_grad_normalized = all_gather(torch.stack([grad_bias, grad_weight]), ctx.group).sum(0) / total
        scale = weight * inverse_std
        # scale x (grad - mean_grad - normalised x mean_grad_normalized), in two passes.
        constant, slope = -scale * mean_grad, -scale * inverse_std * mean_grad_normalized
        grad_x = torch.addcmul(constant.view(shape), centred, slope.view(shape)).addcmul_(wide, scale.view(shape))
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer whose training statistics are those of the images of all ranks; same state_dict as nn.BatchNorm2d.

    Batches of different sizes on the ranks count by their sizes. Every rank must call it the same number of times.

    Args:
        group: the process group; None is the default one.
    """

    group: Any = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (B, C, ...), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, ...) -> the same shape and dtype.

        Raises:
            ValueError: all ranks together have one value for each channel, whose variance is not defined; on every rank.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        weight = self.weight if self.affine else self._constant(input, 1)
        bias = self.bias if self.affine else self._constant(input, 0)
        output: Tensor
        output, mean, moment, total = _Normalize.apply(input, weight, bias, self.eps, self.group)
        count = total[0]
        if count <= 1:
            raise ValueError("expected more than 1 value per channel over all processes when training")
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_((moment / (count - 1)).to(self.running_var.dtype), factor)
        return output

    def _constant(self, input: Tensor, value: float) -> Tensor:
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        return torch.full((self.num_features,), value, dtype=dtype, device=input.device)


def convert(module: nn.Module, group: Any = None) -> nn.Module:
    """`module` with each BatchNorm layer replaced by a SyncBatchNorm that holds the same parameters and buffers."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        layer = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        layer.group = group
        layer.training = module.training
        if module.affine:
            layer.weight, layer.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(layer, name, getattr(module, name))
        return layer
    for name, child in module.named_children():
        setattr(module, name, convert(child, group))
    return module
