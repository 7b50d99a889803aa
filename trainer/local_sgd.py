"""Local SGD (Stich 2019): each rank updates by its own gradients, and every N updates the ranks average what these have made.

For networks that are too slow for a gradient each update. When the ranks average depends on the number of the update alone: after each
N-th, at an epoch's end and at the end of the run. Between, the ranks' weights differ, and nothing may look at them: checkpoints, audits
and stops wait for the next averaging. Averaged are weights, BatchNorm's statistics, the optimizer's state (momenta and the like) and the
averages of --ema_decay, so that after it all ranks are equal, as one checkpoint has them.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.state import Run


def averaging_due(run: Run) -> bool:
    """Whether the ranks are equal after the update that `run.state` has just counted, or are to be made so; always without local SGD."""
    state, every = run.state, run.config.local_sgd_steps
    if every is None or run.processes.count == 1:
        return True
    return state.step % every == 0 or run.max_steps_done or run.plan.rest(state.consumed).micro_batches == 0


@torch.no_grad()
def average_ranks(run: Run) -> None:
    """Make each tensor the mean of all ranks'. A collective; nothing without local SGD."""
    if run.config.local_sgd_steps is None or run.processes.count == 1:
        return
    run.at("averaging")
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in averaged_tensors(run):
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_type.values():
        # One message; each tensor in its own order of memory, which all ranks share.
        flat = torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]).div_(run.processes.count)
        dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.as_strided((tensor.numel(),), (1,)).copy_(mean)


def averaged_tensors(run: Run) -> list[Tensor]:
    """All that updates change, in the same order on all ranks; not counts, which are equal."""
    states = run.optimizer.state
    tensors = [value for tensor in run.module.parameters() if tensor in states for value in states[tensor].values()]
    tensors = [value for value in tensors if isinstance(value, Tensor) and value.ndim]
    tensors += [tensor for tensor in (*run.module.parameters(), *run.module.buffers()) if tensor.is_floating_point()]
    return tensors + (list(run.ema.averages.values()) if run.ema is not None else [])
