"""Runs the contenders of speed.py, one at a time, and reads what each measured; the table of them, and the environment they run in."""

import configparser
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks import sets

HERE = Path(__file__).resolve().parent
MAIN = HERE.parent / "trainer" / "main.py"
FRAMEWORKS = ("transformers", "lightning", "pytorch-accelerated")
OPTIMIZER = ["--optimizer", "adamw", "--lr", "3e-3", "--lr_scheduler", "constant", "--warmup_epochs", "0", "--weight_decay", "0.01"]
TIMEOUT = 3600.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """`script` lies in contenders/, or is OURS; `kind` is its colour; `flags` are added to those that every run of it gets."""

    name: str
    label: str
    script: str
    kind: str = "peer"
    bf16: bool = False
    processes: int = 1
    flags: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.script == OURS


OURS = "trainer/main.py"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("limit_bf16", "limit: bare loop, bf16", "limit.py", "limit", bf16=True),
        Contender("limit", "limit: bare loop, fp32", "limit.py", "limit"),
        Contender("ours_bf16", "this trainer, bf16", OURS, "ours", bf16=True),
        Contender("ours", "this trainer, fp32", OURS, "ours"),
        Contender("tutorial", "DDP tutorials' loop", "tutorial.py"),
        Contender("tutorial_2", "tutorials' DDP, 2 processes", "tutorial.py", processes=2),
        Contender("accelerate", "Accelerate, bare loop", "accelerate_loop.py"),
        Contender("transformers", "transformers.Trainer", "transformers_trainer.py"),
        Contender("lightning", "Lightning", "lightning_trainer.py"),
        Contender("pytorch_accelerated", "pytorch-accelerated", "pytorch_accelerated_trainer.py"),
    )
}
PEERS = ("accelerate", "transformers", "lightning", "pytorch_accelerated")
TWO = (
    replace(CONTENDERS["ours"], name="ours_1x2", label="1 process x 2 threads", flags=("--cpu_threads", "2")),
    *(
        replace(
            CONTENDERS["ours"],
            name=f"ours_2x1_{sync_bn}",
            label=f"2 processes x 1 thread, SyncBN {sync_bn}",
            processes=2,
            flags=("--cpu_threads", "1", "--sync_bn", sync_bn),
        )
        for sync_bn in ("off", "on")
    ),
)


def ready_venv(folder: Path) -> Path:
    """The `python` of the benchmark's own environment, made, or brought up to date when its requirements have changed."""
    setup = configparser.ConfigParser()
    setup.read(HERE.parent / "setup.cfg")
    torch = f"torch=={version('torch').partition('+')[0]}"
    wanted = [torch, *FRAMEWORKS, *setup["options"]["install_requires"].split()]
    python, note = folder / "bin" / "python", folder / "requirements.txt"
    if not note.exists() or note.read_text(encoding="utf-8").split() != wanted:
        print(f"making {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        note.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return python


class Runner:
    """Runs commands on the CPU, with `python` and as many threads as each takes by itself.

    Args:
        python: of the contenders' environment.
        work: a folder for caches and outputs.
        data: the Parquet folder that is trained on.
    """

    def __init__(self, python: Path, work: Path, data: Path) -> None:
        self.python, self.work, self.data = python, work, data
        self.idx = sets.idx_folder(data, work / "sets")
        self.warm: set[tuple[str, Path]] = set()
        dropped = ("OMP_", "MKL_", "ACCELERATE_", "PYTHON", "TORCH")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.environment.update(HF_HOME=str(work / "hf"), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

    def command(self, contender: Contender, data: Path, out: Path) -> list[str]:
        start = [str(self.python)]
        if contender.processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(contender.processes)]
        elif contender.is_ours:
            start = [str(self.python.with_name("accelerate")), "launch", *(("--mixed_precision", "bf16") if contender.bf16 else ())]
        if contender.is_ours:
            script = [str(MAIN), "--dataset", str(data)]
        else:
            source = data if contender.name == "transformers" else self.idx
            script = [str(HERE / "contenders" / contender.script), "--data", str(source), *(("--bf16",) if contender.bf16 else ())]
        return [*start, *script, *contender.flags, "--output_dir", str(out)]

    def run(self, contender: Contender, flags: list[str], skip: int = 0, data: Path | None = None) -> Figures:
        """One run, whose first `skip` steps are not in images_per_second; the first time, after an unmeasured one that fills the caches."""
        data = data or self.data
        if (contender.script, data) not in self.warm:
            self.warm.add((contender.script, data))
            self.run(contender, [*(OPTIMIZER if contender.is_ours else ()), "--max_steps", "1"], data=data)
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        if not contender.is_ours:
            out.mkdir(parents=True)
            flags = [*flags, "--skip", str(skip)]
        figures = self.execute([*self.command(contender, data, out), *flags], contender.processes, out / "metrics.jsonl")
        evaluated_after = figures.pop("evaluated_after")
        return {**figures, **(read_ours(out, skip, evaluated_after) if contender.is_ours else read_record(out))}

    def execute(self, command: list[str], processes: int = 1, metrics: Path | None = None) -> Figures:
        """Whole seconds and peak memory of a command, and when its evaluations stood in `metrics`; to 20 ms.

        Raises:
            SystemExit: it failed, or did not end.
        """
        log = self.work / "log.txt"
        peak, size = 0, 0
        evaluated_after: list[float] = []
        start = time.time()
        with log.open("w", encoding="utf-8") as file:
            environment = {**self.environment, "BENCHMARK_START": repr(start)}
            child = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=self.work, start_new_session=True)
        try:
            while True:
                pid, status, usage = os.wait4(child.pid, os.WNOHANG)
                now = time.time() - start
                if metrics is not None and metrics.exists() and (pid or metrics.stat().st_size != size):
                    size = metrics.stat().st_size
                    count = metrics.read_text(encoding="utf-8").count('"event": "eval"')
                    evaluated_after += [now] * (count - len(evaluated_after))
                if pid:
                    break
                if now > TIMEOUT:
                    raise SystemExit(f"did not end within {TIMEOUT:.0f} s: {' '.join(command)}")
                if processes > 1:
                    peak = max(peak, memory_of_family(child.pid))
                # Looking at all processes of the machine takes milliseconds.
                time.sleep(0.02 if processes == 1 else 0.3)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"failed: {' '.join(command)}\n{log.read_text(encoding='utf-8')[-3000:]}")
        # Linux gives the largest of the command and of what it waited for, in KiB: the launcher, which only waits, is not added.
        return {"seconds": now, "memory_bytes": peak or usage.ru_maxrss * 1024, "evaluated_after": evaluated_after}


def memory_of_family(pid: int) -> int:
    """Resident bytes of a process and all below it; pages they share count more than once."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def read_ours(out: Path, skip: int, evaluated_after: list[float]) -> Figures:
    """From metrics.jsonl: the log windows that begin at or after update `skip`. A window leaves out the writing of its own line."""
    images = step = samples = 0
    seconds = train_seconds = 0.0
    evaluations: list[Figures] = []
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "train":
            count = event["samples"] - samples
            window = count / event["images_per_second"]
            train_seconds += window
            if step >= skip:
                images, seconds = images + count, seconds + window
            step, samples = event["step"], event["samples"]
        elif event["event"] == "eval":
            after = {"after_seconds": evaluated_after[len(evaluations)], "after_train_seconds": train_seconds}
            evaluations.append({**{key: event[key] for key in ("acc1", "samples", "seconds")}, **after})
    startup = json.loads((out / "results.json").read_text(encoding="utf-8")).get("startup_seconds")
    return summary(images, seconds, startup, evaluations)


def read_record(out: Path) -> Figures:
    """From record.json, see contenders/record.py."""
    record = json.loads((out / "record.json").read_text(encoding="utf-8"))
    return summary(record["images"], record["seconds"], record["startup_seconds"], record["evaluations"])


def summary(images: int, seconds: float, startup: float | None, evaluations: list[Figures]) -> Figures:
    hit = next((number for number, one in enumerate(evaluations) if one["acc1"] >= 99), None)
    return {
        "images_per_second": images / seconds if seconds else None,
        "startup_seconds": startup,
        "evaluation_images_per_second": statistics.median(one["samples"] / one["seconds"] for one in evaluations),
        "acc1": [one["acc1"] for one in evaluations],
        "epochs_to_99": None if hit is None else hit + 1,
        "seconds_to_99": None if hit is None else evaluations[hit]["after_seconds"],
        "train_seconds_to_99": None if hit is None else evaluations[hit]["after_train_seconds"],
    }
