"""How gradients go from process to process: small ones through shared memory, and with `--comm_hook` in fewer bytes.

fp16 and bf16 are torch's hooks, which Accelerate registers: each rank's gradient is rounded and divided by their number, the sum is made in
that type. PowerSGD (Vogels et al. 2019) is here: torch's keeps its memories by DDP's buckets, which each process forms anew after its first
backward pass, so that a resume would not be exact, and lets gloo send two buckets' messages in another order on each rank (torch 2.14).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from trainer.config import Config
from trainer.runtime import UserError
from trainer.seeding import derive_seed
from trainer.shared_gather import CAPACITY, memory_for

ACCELERATES = {"fp16": DDPCommunicationHookType.FP16, "bf16": DDPCommunicationHookType.BF16}
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


def share_gradients(ddp: Any) -> bool:
    """Let small buckets of gradients of a DistributedDataParallel model go through shared memory; whether they do. A collective.

    Not on GPUs, and not between hosts. The sums are those of DDP's own all_reduce, on two ranks to the bit.
    """
    if memory_for(torch.zeros(1, device=next(ddp.parameters()).device)) is None:
        return False
    ddp.register_comm_hook(None, reduce_in_memory)
    return True


def reduce_in_memory(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The mean of the ranks' gradients in `bucket`; a large bucket's as DDP would do it. DDP looks at these annotations."""
    buffer = bucket.buffer()
    memory = memory_for(buffer)
    if memory is None:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    # A product, as in DDP: a quotient can have another last bit.
    torch.sum(memory.all_gather(buffer.mul_(1 / dist.get_world_size())), 0, out=buffer)
    return finished(buffer)


def finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """What a hook that has done its work returns."""
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
    done.set_result(buffer)
    return done


class PowerSgd:
    """PowerSGD on a DistributedDataParallel model; makes itself its hook.

    For a weight whose gradient is a matrix M, n x m (a convolution's: output channels x the rest, as memory has it), the ranks exchange
    P = M Q, n x rank, and, with its columns made orthonormal, Q = M^T P, m x rank, from which the next P is made. The gradient becomes
    P Q^T, and what M differs from it by is added to this rank's next M. Other weights' gradients are exchanged as they are.

    Args:
        ddp: the wrapped model, and module: the plain one, for the parameters' names.
        rank: columns.
        start: updates before, whose gradients are exchanged as they are.
        seed: of the first Q.

    Attributes:
        step: finished backward passes that exchanged gradients, which are the updates.
        errors: what was left out, n x m, and factors: Q, both by parameter.
    """

    def __init__(self, ddp: Any, module: nn.Module, rank: int, start: int, seed: int) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.rank, self.start, self.seed, self.step = rank, start, seed, 0
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        ddp.register_comm_hook(self, reduce)

    def shape(self, parameter: nn.Parameter) -> tuple[int, int, int] | None:
        """n, m and columns of the factors; None for a gradient of which they would not be half the bytes."""
        n = len(parameter) if parameter.ndim else 1
        m = parameter.numel() // n
        columns = min(n, m, self.rank)
        return (n, m, columns) if 2 * columns * (n + m) < n * m else None

    def factor(self, parameter: nn.Parameter) -> Tensor:
        """The newest Q, or a random one, the same on all ranks."""
        name, shape = self.names[parameter], self.shape(parameter)
        assert shape is not None
        kept = self.factors.get(name)
        if kept is None or kept.shape != shape[1:]:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "powersgd", name))
            kept = torch.randn(shape[1:], generator=generator, dtype=parameter.dtype)
        return kept.to(parameter.device)

    def compress(self, gradients: list[Tensor], parameters: list[nn.Parameter]) -> None:
        """Make the gradients what the ranks agree on, in place. A collective."""
        # In memory of their own: the rounding of a product depends on where its factors lie, and buckets are not always the same.
        matrices: dict[nn.Parameter, Tensor] = {}
        into: dict[nn.Parameter, Tensor] = {}
        whole: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            shape = self.shape(parameter)
            if shape is None:
                whole.append(gradient)
                continue
            into[parameter] = gradient.view(shape[:2])
            matrices[parameter] = into[parameter].clone()
            if self.names[parameter] in self.errors:
                matrices[parameter] += self.errors[self.names[parameter]].to(gradient.device)
        means = mean_over_ranks([*whole, *(matrix @ self.factor(parameter) for parameter, matrix in matrices.items())])
        for gradient, mean in zip(whole, means, strict=False):
            gradient.copy_(mean)
        bases = [torch.linalg.qr(mean).Q for mean in means[len(whole) :]]
        factors = mean_over_ranks([matrix.T @ base for matrix, base in zip(matrices.values(), bases, strict=True)])
        for (parameter, matrix), base, factor in zip(matrices.items(), bases, factors, strict=True):
            product = base @ factor.T
            into[parameter].copy_(product)
            self.errors[self.names[parameter]] = matrix - product
            self.factors[self.names[parameter]] = factor

    # Checkpoints.

    def state(self) -> dict[str, Tensor]:
        """This rank's memories by name, on the CPU; none before the start."""
        named = {ERROR + name: tensor for name, tensor in self.errors.items()} | {FACTOR + name: t for name, t in self.factors.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def load(self, ranks: Sequence[Mapping[str, Tensor]], step: int) -> None:
        """Go on with the memories of a checkpoint.

        Args:
            ranks: this rank's; or, on another number of processes, all ranks', whose mean keeps what has been left out.
            step: finished updates.
        """
        self.step = step
        for name in self.names.values():
            errors = [tensors[ERROR + name] for tensors in ranks if ERROR + name in tensors]
            if errors:
                self.errors[name] = torch.stack(errors).mean(0) if len(errors) > 1 else errors[0]
            if FACTOR + name in ranks[0]:
                self.factors[name] = ranks[0][FACTOR + name]


def mean_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """The mean of each over all ranks, in one message, as tensors of their own. A collective."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.div_(dist.get_world_size()).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]


def reduce(state: PowerSgd, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The mean of the ranks' gradients in `bucket`, or what PowerSGD makes of it. DDP looks at these annotations."""
    start = state.step < state.start
    state.step += bucket.is_last()
    if start:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    # One bucket after the other, so that all ranks send the same at the same time.
    state.compress(bucket.gradients(), bucket.parameters())
    return finished(bucket.buffer())


def describe_communication(config: Config, processes: int, shared: bool = False) -> str | None:
    """How gradients are exchanged, for the block before training; None where DDP does all of it.

    Args:
        shared: small gradients go through shared memory.
    """
    if config.local_sgd_steps is not None:
        if processes == 1:
            return f"--local_sgd_steps {config.local_sgd_steps} has no effect on one process"
        talks = "; SyncBatchNorm still talks in each forward pass" if config.sync_bn == "on" else ""
        return f"local SGD: weights, statistics and optimizer states are averaged every {config.local_sgd_steps} updates{talks}"
    if config.comm_hook == "none":
        return f"small gradients, up to {4 * CAPACITY // 1024} KB, through shared memory" if shared else None
    if processes == 1:
        return f"--comm_hook {config.comm_hook} has no effect on one process"
    if config.comm_hook == "powersgd":
        return f"powersgd, rank {config.powersgd_rank}, after {config.powersgd_start} updates with whole gradients"
    return f"{config.comm_hook}: gradients are rounded to it, and summed in it"
