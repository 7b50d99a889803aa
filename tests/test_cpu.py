"""What a command sets before torch is imported; in processes of its own."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

CODE = """
import os, resource
from trainer.cpu import prepare_process
prepare_process()
import torch
print(os.environ.get("GOMP_SPINCOUNT"))
for _ in range(3):
    torch.ones(25_000_000).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(25_000_000).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def prepared(**environment: str) -> tuple[str, int]:
    """GOMP_SPINCOUNT, and the page faults of ten blocks of 100 MB."""
    clean = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT" and not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return done[0], int(done[1])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_and_threads_do_not_spin() -> None:
    spin, faults = prepared()
    assert spin == "10000"
    assert faults < 100_000, "the kernel cleared the same memory anew: a block has 24,414 pages"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_the_environment_says_is_left_alone() -> None:
    assert prepared(GOMP_SPINCOUNT="77")[0] == "77"
    assert prepared(OMP_WAIT_POLICY="active")[0] == "None"
    assert prepared(MALLOC_TRIM_THRESHOLD_="131072")[1] > 200_000


RETURNING = """
import psutil
from trainer.runtime import run_call
def megabytes():
    return psutil.Process().memory_info().rss // 2**20
def body(processes):
    import torch
    before.append(megabytes())
    blocks = [torch.ones(250_000) for _ in range(400)]
    held = torch.ones(1)
    del blocks
    before.append(megabytes())
    return held
before = []
held = run_call(body)
print(before[1] - before[0], megabytes() - before[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_program_gets_the_memory_back_when_the_training_has_ended() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", RETURNING], cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 300, "the blocks had not been kept"
    assert left < 100
