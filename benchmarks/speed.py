"""Speed, side by side: this trainer, the limit of the machine, the DDP tutorials' loop and the frameworks, on the same work.

    python benchmarks/speed.py --data FOLDER                       # all parts; FOLDER: the full MNIST as Parquet files
    python benchmarks/speed.py --data FOLDER --part throughput     # one part; benchmarks/speed.json keeps the others
    python benchmarks/speed.py --quick                             # does everything run? Its figures mean nothing

The work: MNIST (without --data the embedded digits, repeated to 60,000 + 10,000), the tutorials' ConvNet, AdamW at a constant 3e-3. Not
the tutorials' SGD at 1e-4, which learns too slowly to ask after how many seconds 99 % are right; constant, so that a run that is cut short
does the same as a long one. Each contender is a small script in benchmarks/contenders/, in the idiom of its own documentation; ours is the
command as the README has it. All run on the CPU, from an environment of the benchmark's own (--venv).

Contenders take turns within each round, because a machine's speed wanders; compared are medians over the rounds of the ratios within a
round.

throughput  images/s from a first number of steps on to the end of the training, evaluation excluded; ours from its log windows. Evaluation
            images/s, and the limit's: the forward pass alone. Two batch sizes; a contender of two processes takes two batches at once.
command     the whole command from start to exit, with an evaluation each epoch and saving; its largest process (of two: the sum of all).
startup     from process start to the end of the first update, beside a Python that only imports. Ours counts from its own process: its
            launcher's start is in the whole command.
accuracy    `--config mnist` to 99 % of the test images.
two         2 processes x 1 thread, with and without SyncBN, against 1 process x 2 threads.
growth      5,000, 60,000 and 600,000 images in memory.
overhead    ours and the limit, an epoch of each in turn in one process, and what an update takes beyond forward, backward and optimizer:
            overhead.py. Stricter than processes in turn: the limit, too, keeps freed memory (trainer/cpu.py), and sees the same minute.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import report, sets
from benchmarks.runner import CONTENDERS, OPTIMIZER, TWO, Contender, Runner, ready_venv

WHOLE_COMMANDS = ("tutorial", "ours", "ours_bf16")
IMPORTS = "import torch, torch._dynamo, accelerate, datasets, time; print(time.time())"
QUICK_STEPS = 60


class Round:
    """One round of each part: its contenders, in turn."""

    def __init__(self, runner: Runner, results: report.Results, number: int, arguments: argparse.Namespace) -> None:
        self.runner, self.results, self.number = runner, results, number
        self.epochs, self.quick = arguments.epochs, arguments.quick
        self.only: list[str] | None = arguments.only

    def measure(
        self, part: str, contender: Contender, flags: list[str], batch_size: int = 32, steps: int | None = None, skip: int = 0
    ) -> None:
        """One run of a contender, of at most `steps` steps, of which the first `skip` are not measured."""
        if self.quick:
            steps, skip = QUICK_STEPS, 0
        limit = ["--max_steps", str(steps)] if steps else []
        optimizer = OPTIMIZER if contender.is_ours else []
        flags = [*optimizer, "--batch_size", str(batch_size), "--seed", str(self.number), *limit, *flags]
        self.results.add(part, self.number, contender.name, self.runner.run(contender, flags, skip), batch_size)

    def throughput(self) -> None:
        for batch_size, (steps, skip) in report.STEPS.items():
            for name, contender in CONTENDERS.items():
                if self.only is None or name in self.only:
                    self.measure("throughput", contender, [], batch_size, steps, skip)

    def command(self) -> None:
        for name in self.only or WHOLE_COMMANDS:
            self.measure("command", CONTENDERS[name], ["--epochs", str(self.epochs)])

    def startup(self) -> None:
        start = time.time()
        ready = subprocess.check_output([str(self.runner.python), "-c", IMPORTS], env=self.runner.environment, text=True)
        self.results.add("startup", self.number, "imports", {"startup_seconds": float(ready) - start})
        # On the embedded set: a larger one takes longer to decode.
        self.measure("startup", CONTENDERS["ours"], ["--dataset", "mnist5k"], steps=1)

    def accuracy(self) -> None:
        flags = ["--config", "mnist", "--seed", str(self.number), *(("--max_steps", str(QUICK_STEPS)) if self.quick else ())]
        self.results.add("accuracy", self.number, "ours", self.runner.run(CONTENDERS["ours"], flags))

    def two(self) -> None:
        steps, skip = report.STEPS[32]
        for contender in TWO:
            self.measure("two", contender, [], steps=steps, skip=skip)

    def growth(self) -> None:
        for images in report.GROWTH[: 2 if self.quick else None]:
            data = sets.resized(self.runner.data, images, self.runner.work / "sets")
            steps, skip = (QUICK_STEPS, 0) if self.quick else (300, 100)
            flags = [*OPTIMIZER, "--batch_size", "32", "--cache", "ram", "--epochs", "2", "--max_steps", str(steps)]
            self.results.add("growth", self.number, f"ours_{images}", self.runner.run(CONTENDERS["ours"], flags, skip, data))

    def overhead(self) -> None:
        file, script = self.runner.work / "overhead.json", Path(__file__).with_name("overhead.py")
        rounds, data = ("1", []) if self.quick else ("3", ["--dataset", str(self.runner.data)])
        for name, precision in (("ours", "no"), ("ours_bf16", "bf16")):
            command = [str(self.runner.python), str(script), "--rounds", rounds, "--result", str(file), "--mixed_precision", precision]
            self.runner.execute([*command, *data, *OPTIMIZER])
            self.results.add("overhead", self.number, name, json.loads(file.read_text(encoding="utf-8")))


PARTS: dict[str, Callable[[Round], None]] = {
    "throughput": Round.throughput,
    "command": Round.command,
    "startup": Round.startup,
    "accuracy": Round.accuracy,
    "two": Round.two,
    "growth": Round.growth,
    "overhead": Round.overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train-*.parquet and test-*.parquet; unset: embedded digits, repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="of the part 'command'")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="unset: all; the results of others stay as they are")
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"for throughput and command: {','.join(CONTENDERS)}")
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_STEPS} steps, into files beside the real ones")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-speed", help="the contenders' environment, made at first use")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "speed", help="caches and outputs")
    arguments = parser.parse_args()
    if unknown := set(arguments.only or ()) - CONTENDERS.keys():
        parser.error(f"--only: there is no contender {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = sets.full_set(arguments.data.resolve() if arguments.data else None, work / "sets")
    runner = Runner(ready_venv(arguments.venv.resolve()), work, data)
    results = report.Results(Path(__file__).with_name("speed-quick.json" if arguments.quick else "speed.json"))
    settings = {"data": str(arguments.data or "embedded, repeated"), "epochs": arguments.epochs, "steps": report.STEPS}
    for part in arguments.part:
        results.forget(part, arguments.only if part in ("throughput", "command") else None)
        for number in range(1 if arguments.quick else arguments.rounds):
            PARTS[part](Round(runner, results, number, arguments))
            results.save(settings)
    print(report.tables(results))
    if any(run["part"] == "throughput" for run in results.runs):
        image = work / "speed.svg" if arguments.quick else ROOT / "docs" / "speed.svg"
        image.write_text(report.picture(results), encoding="utf-8")


if __name__ == "__main__":
    main()
