"""The group is left, and nothing that would hold gloo's threads or GPU memory stays behind. The command's last step."""

import time
import weakref
from typing import Any

import torch.distributed as dist

from trainer.checks.base import Result
from trainer.runtime import Processes, leave_group

NAME = "clean end"
PATIENCE = 60.0


def leave(processes: Processes, model: "weakref.ref[Any] | None") -> Result:
    """Leave the group with all ranks. A collective; afterwards there are none.

    Args:
        model: the prepared model, of which nobody should hold a reference any more.
    """
    count = processes.count
    processes.all_gather(None)
    start = time.perf_counter()
    leave_group(processes)
    seconds = time.perf_counter() - start
    if dist.is_initialized():
        return Result("FAIL", "the process group is still there after destroy_process_group()")
    if model is not None and model() is not None:
        return Result("FAIL", "something still refers to the wrapped model, and so to the group, whose threads can abort Python at its end")
    if count == 1:
        return Result("SKIPPED", "one process: there is no group")
    return Result("PASS", f"group destroyed in {seconds * 1e3:.0f} ms, model released")
