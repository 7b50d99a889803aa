"""What every contender but ours shares: its flags, and the record of its times that speed.py reads. Standard library only."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

LR = 3e-3
EVAL_BATCH_SIZE = 500


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder of the data: torchvision's MNIST root, or Parquet files")
    parser.add_argument("--output_dir", required=True, help="for the weights, and record.json")
    parser.add_argument("--batch_size", type=int, default=32, help="of a process")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, help="end after this many, in the first epoch")
    parser.add_argument("--skip", type=int, default=0, help="steps before the steady state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


class Record:
    """Seconds of training alone, from the end of step `skip` on; start-up; evaluations. The calls cost about 0.3 µs a step.

    train_start, step (after each), train_end, for each epoch; then evaluated; at the end save.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.born = float(os.environ.get("BENCHMARK_START") or time.time())
        self.steps = self.images = 0
        self.seconds = self.train_seconds = 0.0
        self.startup: float | None = None
        self.evaluations: list[dict[str, Any]] = []
        self.since = self.steady_since = 0.0
        self.training = False

    def train_start(self) -> None:
        self.training = True
        self.since = self.steady_since = time.perf_counter()

    def step(self, images: int) -> bool:
        """Count a finished step of `images`, over all processes; whether it was the last one allowed."""
        self.steps += 1
        if self.steps == 1:
            self.startup = time.time() - self.born
        if self.steps > self.flags.skip:
            self.images += images
        elif self.steps == self.flags.skip:
            self.steady_since = time.perf_counter()
        return self.steps == self.flags.max_steps

    def train_end(self) -> None:
        """Training rests: an evaluation comes, or the end. A second call changes nothing."""
        if self.training:
            now = time.perf_counter()
            self.train_seconds += now - self.since
            self.seconds += now - self.steady_since if self.steps > self.flags.skip else 0.0
        self.training = False

    def evaluated(self, accuracy: float, samples: int, seconds: float) -> None:
        """An evaluation has ended: `accuracy` in percent."""
        after = {"after_seconds": time.time() - self.born, "after_train_seconds": self.train_seconds}
        self.evaluations.append({"acc1": accuracy, "samples": samples, "seconds": seconds, **after})
        print(f"accuracy {accuracy:.2f} %", flush=True)

    def save(self) -> None:
        content = {"images": self.images, "seconds": self.seconds, "startup_seconds": self.startup, "evaluations": self.evaluations}
        (Path(self.flags.output_dir) / "record.json").write_text(json.dumps(content), encoding="utf-8")
