"""What safety costs: training with checkpoints, stops, hang watch, audit and finite checks at their defaults, against without any.

    python benchmarks/safety.py --dataset mnist             # or a local folder that holds the full MNIST; default: mnist5k
    python benchmarks/safety.py --processes 2

Epochs with and without take turns in one run of one process group; the figure is the ratio of the medians. Prints one table and writes
benchmarks/safety.json.
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
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def measure(dataset: str, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of each epoch; on every process of the group that the environment describes."""
    from trainer import loop
    from trainer.accelerator import build_accelerator
    from trainer.config import Config
    from trainer.data.loaders import load_data
    from trainer.hooks.audit import Audit
    from trainer.hooks.base import Hook, HookList
    from trainer.hooks.checkpoints import Checkpoints
    from trainer.hooks.early_stopping import EarlyStopping
    from trainer.hooks.gather_metrics import GatherMetrics
    from trainer.hooks.max_time import MaxTime
    from trainer.hooks.save_on_main import SaveOnMain
    from trainer.hooks.seed_processes import SeedProcesses
    from trainer.hooks.set_epoch import SetEpoch
    from trainer.runtime import join, leave_group
    from trainer.state import Run, build_run
    from trainer.watch import Watch

    processes = join()
    config = Config(dataset=dataset, output_dir=folder, epochs=2 * rounds + 2, early_stopping_patience=10**6, max_time="100:00:00")
    accelerator = build_accelerator(config, processes)
    run = build_run(config, processes, load_data(config, processes), accelerator)
    run.output_dir = Path(folder)
    agree, see, norm, quiet = loop.interrupted, run.finite.see, loop.torch.nn.utils.get_total_norm, Watch(processes, 0)
    watch = run.watch
    watch.start(run.output_dir)
    needed: tuple[Hook, ...] = (SetEpoch(), SeedProcesses(), GatherMetrics(), SaveOnMain())
    safe = (*needed, Audit(), MaxTime(), EarlyStopping())
    with_safety, without = HookList((*safe, Checkpoints(safe))), HookList(needed)
    parts: dict[str, float] = {"checkpoint": 0.0}

    def epoch(hooks: HookList, safety: bool) -> float:
        loop.interrupted = agree if safety else lambda run: False
        run.finite.see = see if safety else lambda *values: None  # type: ignore[method-assign]
        loop.torch.nn.utils.get_total_norm = norm if safety else lambda gradients: None
        run.watch = watch if safety else quiet
        start = time.perf_counter()
        hooks.on_epoch_start(run)
        loop.train_epoch(run, hooks)
        loop.evaluate(run, hooks)
        run.state.finish_epoch()
        before = time.perf_counter()
        hooks.on_epoch_end(run)
        if safety:
            parts["checkpoint"] += time.perf_counter() - before
        return time.perf_counter() - start

    def first(run: Run) -> None:
        for hooks in (with_safety, without):
            hooks.on_fit_start(run)
            epoch(hooks, hooks is with_safety)

    first(run)
    parts["checkpoint"] = 0.0
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        seconds["with"].append(epoch(with_safety, True))
        seconds["without"].append(epoch(without, False))
    processes.stops.agreed_now()
    watch.close()
    leave_group(processes)
    ratio = statistics.median(seconds["with"]) / statistics.median(seconds["without"])
    return {"updates": run.plan.updates, "ratio": ratio, "end of an epoch, s": parts["checkpoint"] / rounds, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist5k", help="mnist5k, the full MNIST ('mnist'), or a local folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of epochs")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        result = measure(arguments.dataset, arguments.rounds, str(Path(arguments.result).parent / "run"))
        if int(os.environ.get("RANK", "0")) == 0:
            Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        flags = ["--dataset", arguments.dataset, "--rounds", str(arguments.rounds), "--result", str(file)]
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(arguments.processes)]
        subprocess.run([sys.executable, *launcher, __file__, *flags], check=True)
        result = json.loads(file.read_text(encoding="utf-8"))
    print("| data | processes | updates an epoch | with / without | epoch without, s | end of an epoch (audit, checkpoint), s |")
    print("|---|---|---|---|---|---|")
    without = statistics.median(result["without"])
    row = (arguments.dataset, arguments.processes, result["updates"], f"{result['ratio']:.3f}", f"{without:.2f}")
    print(f"| {' | '.join(map(str, row))} | {result['end of an epoch, s']:.3f} |")
    (ROOT / "benchmarks" / "safety.json").write_text(json.dumps({**vars(arguments), **result}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
