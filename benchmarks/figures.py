"""Measures the README's figures again: the recipes' accuracies, and the tutorials' table on one and two processes.

    python benchmarks/figures.py --dataset mnist            # or a local folder that holds the full MNIST
    python benchmarks/figures.py --dataset mnist --only tutorial --seeds 5

Each figure is a real `accelerate launch`, one after the other; the result is a Markdown table on stdout and benchmarks/figures.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS: dict[str, list[tuple[str, str]]] = {
    # recipe: (what it is, accelerate config)
    "mnist5k": [("mnist5k, 1 process", "cpu")],
    "mnist": [("mnist, 1 process", "cpu")],
    "tutorial": [("tutorial, 1 process", "cpu"), ("tutorial, 2 processes, SyncBN", "multi_cpu")],
}


def measure(recipe: str, launcher: str, dataset: str, seed: int) -> dict[str, Any]:
    """One training; its results.json, and the whole command's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            str(Path(sys.executable).with_name("accelerate")),
            *("launch", "--config_file", str(ROOT / "accelerate_configs" / f"{launcher}.yaml"), str(ROOT / "trainer" / "main.py")),
            *("--config", recipe, "--seed", str(seed), "--output_dir", str(out), "--log_interval", "1000"),
            *(("--dataset", dataset) if recipe != "mnist5k" else ()),
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, text=True)
        results: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
        return {"seed": seed, "command_seconds": time.perf_counter() - start, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", help="the full MNIST: the Hub's, or a local folder")
    parser.add_argument("--only", choices=sorted(ROWS), help="one recipe instead of all")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... of each row")
    arguments = parser.parse_args()
    dataset = str(Path(arguments.dataset).resolve()) if os.path.isdir(arguments.dataset) else arguments.dataset
    table: dict[str, Any] = {}
    print("| what | test accuracy, % (mean of seeds; range) | training, s | whole command, s |\n|---|---|---|---|")
    for recipe, rows in ROWS.items():
        for name, launcher in rows if arguments.only in (None, recipe) else ():
            runs = [measure(recipe, launcher, dataset, seed) for seed in range(arguments.seeds)]
            accuracies = [run["acc1"] for run in runs]
            table[name] = runs
            print(
                f"| {name} | {statistics.mean(accuracies):.2f} ({min(accuracies):.2f} to {max(accuracies):.2f}) "
                f"| {statistics.median(run['train_seconds'] for run in runs):.1f} "
                f"| {statistics.median(run['command_seconds'] for run in runs):.1f} |",
                flush=True,
            )
    for runs in table.values():
        for run in runs:
            for part in ("confusion", "per_class", "calibration", "mistakes"):
                del run[part]
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
