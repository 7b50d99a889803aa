"""`kill -9` at random moments of a training on two processes, relaunched each time: is the end that of an undisturbed one, bit for bit?

    python benchmarks/kills.py --kills 20

Launches mnist5k with a checkpoint every 3 updates, so that many kills hit a save; all processes are killed at once. Prints a line for
each kill and the verdict; exits with 1 when the ends differ.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent


def start(folder: Path, epochs: int) -> "subprocess.Popen[bytes]":
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launcher = ["launch", "--config_file", str(ROOT / "accelerate_configs" / "multi_cpu.yaml"), "--main_process_port", "0"]
    flags = ["--epochs", str(epochs), "--checkpointing_steps", "3", "--log_interval", "10", "--output_dir", str(folder), "--resume", "auto"]
    log = (folder.parent / f"{folder.name}.out").open("ab")
    return subprocess.Popen([accelerate, *launcher, str(ROOT / "trainer" / "main.py"), *flags], stdout=log, stderr=log)


def end_of(folder: Path) -> dict[str, Any]:
    """All tensors of the last checkpoint and of the best model, and the metrics without times."""
    last = max((folder / "checkpoints").glob("step_*"))
    files = [*last.glob("*.safetensors"), folder / "model" / "model.safetensors"]
    tensors = {f"{file.name}/{name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()}
    times = ("seconds", "images_per_second", "data_fraction")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    metrics = [{key: value for key, value in line.items() if key not in times} for line in lines]
    return {"last": last.name, "tensors": tensors, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        whole, parts = Path(place, "whole"), Path(place, "parts")
        if start(whole, arguments.epochs).wait():
            raise SystemExit((Path(place) / "whole.out").read_text(encoding="utf-8"))
        inside_a_save = 0
        for number in range(1, arguments.kills + 1):
            launcher = start(parts, arguments.epochs)
            log = parts / "train.log"
            before = log.read_text(encoding="utf-8").count("updates") if log.exists() else 0
            while launcher.poll() is None and not (log.exists() and log.read_text(encoding="utf-8").count("updates") > before):
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 1.2))
            if launcher.poll() is not None:
                raise SystemExit(f"it had ended after {number - 1} kills: give more --epochs")
            family = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
            for process in family:
                process.kill()
            launcher.wait()
            psutil.wait_procs(family, timeout=10)
            half = bool(list((parts / "checkpoints").glob(".*")))
            inside_a_save += half
            newest = max((path.name for path in (parts / "checkpoints").glob("step_*")), default="none")
            print(f"kill {number}: newest checkpoint {newest}{', inside a save' if half else ''}", flush=True)
        if start(parts, arguments.epochs).wait():
            raise SystemExit((Path(place) / "parts.out").read_text(encoding="utf-8")[-3000:])
        equal = end_of(whole) == end_of(parts)
    print(f"{arguments.kills} kills, {inside_a_save} inside a save: the end is {'equal, bit for bit' if equal else 'NOT EQUAL'}")
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
