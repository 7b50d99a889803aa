"""The processes: as many as were launched, talking to each other, each on a device of its own."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from trainer.checks.base import Result, Subject, quantity


def check(subject: Subject) -> Result:
    facts = subject.each(lambda: _facts(subject))
    sums = subject.each(lambda: _sum_of_ranks(subject))
    first = facts[0]
    count = subject.count
    wrong = []
    launched = {fact["launched"] for fact in facts}
    if launched != {None} and launched != {str(count)}:
        wrong.append(
            f"the launcher started WORLD_SIZE={' or '.join(sorted(map(str, launched)))} processes, but the group has {count}: initialise "
            "the process group in every process (on a machine without GPU Accelerate needs Accelerator(cpu=True) for it)"
        )
    if any(fact["accelerate"] not in (None, count) for fact in facts):
        wrong.append(f"Accelerate counts {first['accelerate']} processes, the group has {count}")
    devices = [(fact["host"], fact["device"]) for fact in facts]
    shared = sorted({device for device in devices if devices.count(device) > 1})
    if shared:
        users = [rank for rank, device in enumerate(devices) if device == shared[0]]
        wrong.append(
            f"ranks {' and '.join(map(str, users))} share {first['kind']} {shared[0][1]} of {shared[0][0]}: give each its own, for example "
            "torch.cuda.set_device(local_rank) before anything else"
        )
    if count > 1 and first["kind"] == "cuda" and first["backend"] != "nccl":
        wrong.append(f"the backend is {first['backend']} on GPUs: nccl is the one that is fast there")
    expected = count * (count + 1) // 2
    if any(total != expected for total in sums):
        wrong.append(f"an all_reduce of 1 to {count} gives {sums} on the ranks, and should give {expected}")
    if wrong:
        return Result("FAIL", "; ".join(wrong))
    hosts = len({fact["host"] for fact in facts})
    kind = f"a {first['kind']} device each" if first["kind"] != "cpu" else "on the CPU"
    where = f" on {hosts} hosts" if hosts > 1 else ""
    told = "= WORLD_SIZE" if launched != {None} else "(WORLD_SIZE is not set)"
    return Result("PASS", f"{first['backend'] or 'no group'}, {quantity(count, 'process', 'processes')} {told}{where}, {kind}")


def _facts(subject: Subject) -> dict[str, Any]:
    parameter = next(subject.module.parameters(), None) if subject.model is not None else None
    device = parameter.device if parameter is not None else subject.device
    # Several processes may share a CPU; its number stands for the process.
    own: Any = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else os.getpid()
    return {
        "launched": os.environ.get("WORLD_SIZE") or None,
        "accelerate": subject.accelerator.num_processes if subject.accelerator is not None else None,
        "host": socket.gethostname(),
        "device": str(own),
        "kind": device.type,
        "backend": dist.get_backend() if dist.is_initialized() else None,
    }


def _sum_of_ranks(subject: Subject) -> int:
    number = torch.tensor(subject.rank + 1, device=subject.device)
    if dist.is_initialized():
        dist.all_reduce(number)
    return int(number)
