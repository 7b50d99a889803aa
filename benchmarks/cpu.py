"""What trainer/cpu.py gains: steps of the ConvNet with and without it, alone and beside another busy process.

    python benchmarks/cpu.py

Each figure is a process of its own; they take turns over several rounds, and the table shows medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("as it is", "threads sleep", "memory kept", "both")


def measure(way: str, batch_size: int, steps: int) -> float:
    """Median milliseconds of a training step, of this process."""
    sys.path.insert(0, str(ROOT))
    from trainer.cpu import SPIN_COUNT, keep_freed_memory

    if way in ("threads sleep", "both"):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    if way in ("memory kept", "both"):
        keep_freed_memory()
    import torch
    import torch.nn.functional as F

    from trainer.models.convnet import ConvNet

    model = ConvNet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images, labels = torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,))
    times = []
    for step in range(steps + 10):
        start = time.perf_counter()
        chosen = torch.arange(batch_size) + step * batch_size % (4096 - batch_size)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, batch_size, steps = arguments.measure
        print(measure(way, int(batch_size), int(steps)))
        return
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_", "GOMP_"))}
    rows = [(neighbour, batch_size, steps) for neighbour in (False, True) for batch_size, steps in ((32, 200), (256, 40))]
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for neighbour, batch_size, steps in rows:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])] if neighbour else []
            for way in WAYS:
                command = [sys.executable, __file__, "--measure", way, str(batch_size), str(steps)]
                done = subprocess.run(command, env=clean, check=True, capture_output=True, text=True)
                found.setdefault(f"{neighbour} {batch_size} {way}", []).append(float(done.stdout))
            for process in busy:
                process.kill()
    print(f"| ms a step (median of {arguments.rounds}) | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for neighbour, batch_size, _ in rows:
        values = [f"{statistics.median(found[f'{neighbour} {batch_size} {way}']):.2f}" for way in WAYS]
        print(f"| batch {batch_size}, {'beside a busy process' if neighbour else 'alone'} | {' | '.join(values)} |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
