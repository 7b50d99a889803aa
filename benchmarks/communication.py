"""What --comm_hook and --local_sgd_steps save on a slow network: seconds of an update, and bytes sent, on two hosts.

    sudo python benchmarks/communication.py

The hosts are network namespaces of this machine (tests/hosts.py), one process on each, joined by a link that tc slows down. All ways
take turns at each speed, in one process group. Prints one table and writes benchmarks/communication.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# As tc has them.
SPEEDS: dict[str, str | None] = {"not slowed": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"comm_hook": "fp16"},
    "bf16": {"comm_hook": "bf16"},
    "powersgd": {"comm_hook": "powersgd", "powersgd_start": 2},
    "local SGD, 8": {"local_sgd_steps": 8},
}
# Updates; a whole period of local SGD is measured, after one.
MEASURED = 8
READY = "ready for "


def measure(model: str) -> None:
    """A process: for each speed that a line of stdin announces, all ways; rank 0 prints a line of JSON for each speed."""
    import psutil

    from trainer.accelerator import build_accelerator
    from trainer.config import Config
    from trainer.data.loaders import load_data
    from trainer.hooks.base import Hook, HookList
    from trainer.hooks.seed_processes import SeedProcesses
    from trainer.hooks.set_epoch import SetEpoch
    from trainer.loop import train_epoch
    from trainer.runtime import end, join
    from trainer.state import Run, build_run

    class Clock(Hook):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.sent: list[int] = []

        def on_step_end(self, run: Run) -> None:
            self.times.append(time.perf_counter())
            self.sent.append(psutil.net_io_counters().bytes_sent)

    processes = join()
    for speed in SPEEDS:
        if processes.is_main:
            print(READY + speed, flush=True)
            sys.stdin.readline()
        processes.broadcast(None)
        figures: dict[str, dict[str, float]] = {}
        for way, knobs in WAYS.items():
            warm_up = knobs.get("local_sgd_steps", 3)
            config = Config(
                model=model,
                image_size="32",
                batch_size=8,
                optimizer="sgd",
                max_steps=warm_up + MEASURED,
                sync_bn="off",
                cpu_threads=1,
                **knobs,
            )
            run = build_run(config, processes, load_data(config, processes), build_accelerator(config, processes))
            clock = Clock()
            hooks = HookList((SetEpoch(), SeedProcesses(), clock))
            hooks.on_epoch_start(run)
            run.processes.stops.training = True
            train_epoch(run, hooks)
            figures[way] = {
                "seconds": (clock.times[-1] - clock.times[warm_up - 1]) / MEASURED,
                "megabytes": (clock.sent[-1] - clock.sent[warm_up - 1]) / MEASURED / 1e6,
                "parameters": sum(parameter.numel() for parameter in run.module.parameters()),
            }
            run.close()
            del run
        if processes.is_main:
            print(json.dumps(figures), flush=True)
    end(processes)


def drive(model: str) -> dict[str, dict[str, dict[str, float]]]:
    """Start a process on each host, and set the link's speed whenever they are ready for another."""
    from tests.hosts import two_hosts

    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        children = []
        for rank, host in enumerate(hosts):
            variables = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
            variables |= {"MASTER_ADDR": hosts.a.address, "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "", "GOMP_SPINCOUNT": "1000"}
            children.append(
                subprocess.Popen(
                    host.command(sys.executable, __file__, "--worker", "--model", model),
                    cwd=folder,
                    env={**os.environ, **variables},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        speaker = children[0]
        assert speaker.stdin is not None
        assert speaker.stdout is not None
        speed = ""
        for line in speaker.stdout:
            if line.startswith(READY):
                speed = line.removeprefix(READY).strip()
                hosts.slow(SPEEDS[speed])
                speaker.stdin.write("\n")
                speaker.stdin.flush()
            elif line.startswith("{"):
                found[speed] = json.loads(line)
                print(f"measured: {speed}", file=sys.stderr, flush=True)
        if any(child.wait(60) for child in children):
            raise SystemExit("a process failed")
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: seconds of an update, its ratio to that of `none` at the same speed, and megabytes that a host sends for it."""
    lines = ["| | " + " | ".join(found) + " | MB sent an update |", "|---|" + "---|" * (len(found) + 1)]
    for way in WAYS:
        cells = [
            f"{figures[way]['seconds']:.3f} s ({figures[way]['seconds'] / figures['none']['seconds']:.2f})" for figures in found.values()
        ]
        sent = next(reversed(found.values()))[way]["megabytes"]
        lines.append(f"| {way} | {' | '.join(cells)} | {sent:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.model)
        return
    from tests.hosts import missing_tools

    missing = missing_tools()
    if missing is not None:
        raise SystemExit(missing)
    found = drive(arguments.model)
    content = {"model": arguments.model, "batch": 8, "updates": MEASURED, "speeds": found}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    parameters = next(iter(found.values()))["none"]["parameters"]
    print(f"{arguments.model}, {parameters:,.0f} parameters, 8 images a process, SGD with momentum; in brackets: over `none`")
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
