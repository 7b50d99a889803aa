"""What must be set in a process before torch is imported, for torch on a CPU to be fast. benchmarks/cpu.py measures it."""

import ctypes
import os
import sys
from typing import Any

# Of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 1 << 30
# With a tenth of it, threads that sleep between the parts of a small model's step, and have to be woken, took a fifth of the step.
SPIN_COUNT = "10000"


def prepare_process() -> None:
    """Let OpenMP's threads sleep soon when they wait, and let glibc keep freed memory; what the environment says of either is left alone.

    GNU OpenMP's threads spin for milliseconds at the end of each parallel region. Beside any other busy process (a data worker, a
    second training) they take the cores from the thread that they wait for, and a step takes several times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if not any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        keep_freed_memory()


def keep_freed_memory() -> None:
    """glibc returns each large block to the kernel, which then clears it again, page by page, for the next batch's activations."""
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, LARGEST)


def return_freed_memory() -> None:
    """Give the kernel what glibc has kept: after a training the data and the activations, which whatever comes next does not need."""
    malloc_trim = _of_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_libc(name: str) -> Any:
    """A function of glibc; None on another system, or with another library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
