"""Gradients that take fewer bytes between the processes: `--comm_hook`.

fp16 and bf16 are torch's hooks, which Accelerate registers: each rank's gradient is rounded and divided by their number, the sum is made in
that type. PowerSGD (Vogels et al. 2019) is torch's too, with its memories kept by parameter, so that a run can be resumed to the bit:
torch's are laid out as DDP's buckets, which another process forms anew after its first backward pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from trainer.config import Config
from trainer.runtime import UserError
from trainer.seeding import derive_seed

ACCELERATES = {"fp16": DDPCommunicationHookType.FP16, "bf16": DDPCommunicationHookType.BF16}
# What keeps a column of zeros, of a layer without gradient, from becoming NaN.
EPSILON = 1e-8
ERROR, FACTOR = "powersgd_error/", "powersgd_factor/"


def accelerates_hook(config: Config, device: torch.device, scaler: bool) -> DDPCommunicationHookType:
    """What Accelerate has to register.

    Raises:
        UserError: the hook cannot work here.
    """
    if config.comm_hook == "bf16" and device.type == "cuda" and torch.cuda.nccl.version() < (2, 10):
        raise UserError("--comm_hook bf16 needs nccl 2.10 or newer: use fp16 or none")
    if config.comm_hook == "powersgd" and scaler:
        raise UserError(
            "--comm_hook powersgd keeps what it leaves out of a gradient for the next one, which fp16's GradScaler spoils by each overflow "
            "and change of its scale: use --mixed_precision bf16 or no, or another hook"
        )
    return ACCELERATES.get(config.comm_hook, DDPCommunicationHookType.NO)


class PowerSgd:
    """PowerSGD on a DistributedDataParallel model; makes itself its hook.

    For a weight whose gradient is a matrix M, n x m (a convolution's: output channels x the rest), the ranks exchange two factors of
    `rank` columns, and what M differs from their product by is added to this rank's next M.

    Args:
        ddp: the wrapped model, and module: the plain one, for the parameters' names.
        start: updates before, whose gradients are exchanged as they are; at least 2.
        step: finished updates.

    Raises:
        UserError: a parameter without dimensions, which torch's hook cannot take.
    """

    def __init__(self, ddp: Any, module: nn.Module, rank: int, start: int, seed: int, step: int = 0) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        scalars = [name for name, parameter in module.named_parameters() if parameter.requires_grad and not parameter.ndim]
        if scalars:
            raise UserError(f"--comm_hook powersgd cannot take the parameter {scalars[0]}, which has no dimension: use another hook")
        self.torchs = PowerSGDState(None, rank, start, orthogonalization_epsilon=EPSILON)
        self.torchs.iter = step
        self.seed = seed
        # Of parameters that are in no bucket at the moment, flat: what was left out, and the factor m x rank.
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        # As torch's memories are laid out now.
        self.buckets: dict[int, list[nn.Parameter]] = {}
        ddp.register_comm_hook(self, reduce)

    def arrange(self, bucket: dist.GradBucket) -> None:
        """Lay torch's memories out for the parameters that `bucket` holds."""
        index, parameters = bucket.index(), bucket.parameters()
        held = self.buckets.get(index)
        if held is not None and [id(parameter) for parameter in held] == [id(parameter) for parameter in parameters]:
            return
        if held is not None:
            self.take_apart()
        errors = [self.errors.pop(self.names[parameter], parameter.new_zeros(parameter.numel())) for parameter in parameters]
        factors = [self._factor(parameter) for parameter in self.compressed(parameters)]
        rows = sum(len(parameter) * self._columns(parameter) for parameter in self.compressed(parameters))
        buffer = bucket.buffer()
        self.torchs.error_dict[index] = torch.cat(errors).to(buffer)
        self.torchs.p_memory_dict[index] = buffer.new_empty(rows)
        self.torchs.q_memory_dict[index] = torch.cat(factors).to(buffer) if factors else buffer.new_empty(0)
        self.buckets[index] = parameters

    def take_apart(self) -> None:
        """Give each parameter its part of torch's memories, and empty these."""
        for index, parameters in self.buckets.items():
            sizes = [parameter.numel() for parameter in parameters]
            parts = self.torchs.error_dict[index].split(sizes)
            self.errors |= {self.names[parameter]: part for parameter, part in zip(parameters, parts, strict=True)}
            matrices = self.compressed(parameters)
            sizes = [self._width(parameter) * self._columns(parameter) for parameter in matrices]
            parts = self.torchs.q_memory_dict[index].split(sizes)
            self.factors |= {self.names[parameter]: part for parameter, part in zip(matrices, parts, strict=True)}
        for memory in (self.torchs.error_dict, self.torchs.p_memory_dict, self.torchs.q_memory_dict, self.buckets):
            memory.clear()

    def compressed(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those that torch compresses, since that halves their bytes at least, in its order: by shape."""
        shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            n, m = len(parameter), self._width(parameter)
            if (n + m) * self._columns(parameter) * self.torchs.min_compression_rate < n * m:
                shapes.setdefault((n, m), []).append(parameter)
        return [parameter for same in shapes.values() for parameter in same]

    @staticmethod
    def _width(parameter: nn.Parameter) -> int:
        return parameter.numel() // len(parameter)

    def _columns(self, parameter: nn.Parameter) -> int:
        return min(len(parameter), self._width(parameter), self.torchs.matrix_approximation_rank)

    def _factor(self, parameter: nn.Parameter) -> Tensor:
        """The one kept, or a random one, the same on all ranks and whatever the buckets are."""
        name, size = self.names[parameter], self._width(parameter) * self._columns(parameter)
        kept = self.factors.pop(name, None)
        if kept is not None and len(kept) == size:
            return kept.to(parameter.device)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "powersgd", name))
        return torch.randn(size, generator=generator, dtype=parameter.dtype).to(parameter.device)

    # Checkpoints.

    def state(self) -> dict[str, Tensor]:
        """This rank's memories by name, on the CPU; none before the start."""
        self.take_apart()
        named = {ERROR + name: tensor for name, tensor in self.errors.items()} | {FACTOR + name: t for name, t in self.factors.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def load(self, ranks: list[Mapping[str, Tensor]], step: int) -> None:
        """Go on with the memories of a checkpoint.

        Args:
            ranks: this rank's; or, on another number of processes, all ranks', whose mean keeps what has been left out.
        """
        self.torchs.iter = step
        for name in self.names.values():
            errors = [tensors[ERROR + name] for tensors in ranks if ERROR + name in tensors]
            if errors:
                self.errors[name] = torch.stack(errors).mean(0) if len(errors) > 1 else errors[0]
            if FACTOR + name in ranks[0]:
                self.factors[name] = ranks[0][FACTOR + name]


def reduce(state: PowerSgd, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of the ranks' gradients in `bucket`, or what PowerSGD makes of it."""
    if state.torchs.iter >= state.torchs.start_powerSGD_iter:
        state.arrange(bucket)
    return powerSGD_hook(state.torchs, bucket)


def describe_communication(config: Config, processes: int) -> str | None:
    """What differs from the mean of gradients, for the block before training; None when nothing does."""
    if config.local_sgd_steps is not None:
        if processes == 1:
            return f"--local_sgd_steps {config.local_sgd_steps} has no effect on one process"
        talks = "; SyncBatchNorm still talks in each forward pass" if config.sync_bn == "on" else ""
        return f"local SGD: weights, statistics and optimizer states are averaged every {config.local_sgd_steps} updates{talks}"
    if config.comm_hook == "none":
        return None
    if processes == 1:
        return f"--comm_hook {config.comm_hook} has no effect on one process"
    if config.comm_hook == "powersgd":
        return f"powersgd, rank {config.powersgd_rank}, after {config.powersgd_start} updates with whole gradients"
    return f"{config.comm_hook}: gradients are rounded to it, and summed in it"
