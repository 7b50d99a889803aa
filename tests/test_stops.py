"""Stops on request, as users and batch systems send them: to a launcher or to one worker of it, with real signals and real launches."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import ROOT, write_ids
from tests.launching import ACCELERATE, CONFIGS, MAIN, environment, started
from trainer.checkpoint import listed
from trainer.files import problem

TWO = (*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
ENDLESS = ("--epochs", "100000", "--log_interval", "1", "--batch_size", "8", "--checkpointing_steps", "1000000")
LIMIT = 60.0


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 16)


def wait_for(what: str, condition: Any, seconds: float = LIMIT) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


def workers_of(launcher: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The training processes, in rank order."""
    found: dict[int, psutil.Process] = {}
    ours = psutil.Process(launcher.pid)
    # Without a launcher the training is the process itself; parents come before their data workers, whose command line is the same.
    for child in (ours, *ours.children(recursive=True)):
        try:
            if any(word.endswith("main.py") for word in child.cmdline()[1:3]):
                found.setdefault(int(child.environ().get("RANK", "0")), child)
        except psutil.Error:
            continue
    return [found[rank] for rank in sorted(found)]


def training(folder: Path) -> bool:
    """Whether the loop runs."""
    log = folder / "train.log"
    return log.exists() and "\neval " in log.read_text()


def gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def stopped_launch(
    tmp_path: Path,
    launcher: Sequence[str | Path],
    dataset: Path,
    count: int,
    strike: Any,
    variables: dict[str, str] | None = None,
    flags: Sequence[str] = ENDLESS,
) -> tuple[int, dict[str, Any], str, str]:
    """Launch, wait until it trains, `strike(launcher, workers)`; the launcher's code, exit.json, stdout, stderr. Nothing outlives it."""
    folder = tmp_path / "run"
    with started(*launcher, MAIN, "--dataset", dataset, "--output_dir", folder, *flags, cwd=tmp_path, variables=variables) as child:
        try:
            wait_for("training", lambda: training(folder) or child.poll() is not None)
            workers = workers_of(child)
            assert len(workers) == count, child.communicate(timeout=10)
            family = [process for worker in workers for process in (worker, *worker.children(recursive=True))]
            strike(child, workers)
            # 15 s is what a user will wait (YOLOX#958).
            wait_for("the end of all processes", lambda: gone(family), 15)
            out, errors = child.communicate(timeout=20)
        finally:
            for process in workers_of(child) if child.poll() is None else ():
                process.kill()
            child.kill()
    assert (folder / "exit.json").exists(), (out, errors)
    return child.returncode, json.loads((folder / "exit.json").read_text()), out, errors


def check_stop(tmp_path: Path, end: dict[str, Any], errors: str, reason: str) -> None:
    assert end["code"] == 75
    assert end["resumable"] is True
    assert end["reason"].startswith(reason)
    checkpoints = listed(tmp_path / "run" / "checkpoints")
    assert [problem(path) for path in checkpoints] == [None], "one whole checkpoint"
    assert checkpoints[0].name == f"step_{end['step']:08d}"
    assert errors.count("stopped: ") == 1
    assert f"{os.sep}trainer{os.sep}loop.py" not in errors, "a traceback of ours"


def to_launcher(number: signal.Signals) -> Any:
    return lambda launcher, workers: launcher.send_signal(number)


def to_worker(number: signal.Signals, rank: int) -> Any:
    return lambda launcher, workers: workers[rank].send_signal(number)


TERM = to_launcher(signal.SIGTERM)


@pytest.mark.parametrize(
    ("strike", "reason", "variables"),
    [
        (TERM, "SIGTERM", {}),
        (to_launcher(signal.SIGINT), "SIGINT", {}),
        # As slurm.sbatch exports it.
        (to_launcher(signal.SIGUSR1), "SIGUSR1", {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}),
        (to_launcher(signal.SIGKILL), "the launcher ended", {}),
        (to_worker(signal.SIGTERM, 1), "SIGTERM", {}),
        (to_worker(signal.SIGUSR1, 0), "SIGUSR1", {}),
        (to_worker(signal.SIGINT, 1), "SIGINT", {}),
    ],
    ids=["term", "int", "usr1", "kill", "term to 1", "usr1 to 0", "int to 1"],
)
def test_two_processes(tmp_path: Path, ids: Path, strike: Any, reason: str, variables: dict[str, str]) -> None:
    # With data workers: launchers signal the whole process group of a rank.
    flags = (*ENDLESS, "--num_workers", "1") if strike is TERM else ENDLESS
    code, end, _, errors = stopped_launch(tmp_path, TWO, ids, 2, strike, variables, flags)
    assert code != 0
    check_stop(tmp_path, end, errors, reason)


@pytest.mark.parametrize(
    ("strike", "reason"),
    [
        (to_launcher(signal.SIGTERM), "the launcher ended"),
        (to_launcher(signal.SIGUSR1), "the launcher ended"),
        (to_worker(signal.SIGINT, 0), "SIGINT"),
    ],
    ids=["term", "usr1", "int to 0"],
)
def test_one_process(tmp_path: Path, ids: Path, strike: Any, reason: str) -> None:
    code, end, _, errors = stopped_launch(tmp_path, ACCELERATE, ids, 1, strike)
    assert code != 0
    check_stop(tmp_path, end, errors, reason)


def at_once(first: int, second: int) -> Any:
    def strike(launcher: "subprocess.Popen[str]", workers: list[psutil.Process]) -> None:
        # Stopped, rank 1 lets rank 0 wait in a collective: only what does not need the main thread can end it.
        workers[1].suspend()
        time.sleep(0.5)
        workers[0].send_signal(first)
        time.sleep(0.5)
        assert workers[0].is_running()
        workers[0].send_signal(second)
        wait_for("the end of rank 0", lambda: gone([workers[0]]), 5)
        workers[1].resume()

    return strike


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_at_once(tmp_path: Path, ids: Path, second: int) -> None:
    code, end, _, errors = stopped_launch(tmp_path, TWO, ids, 2, at_once(signal.SIGINT, second))
    assert code != 0
    assert end == {"code": 1, "reason": "stopped at once, without a checkpoint", "resumable": False, "step": end["step"]}
    assert "stopped at once" in errors
    assert not listed(tmp_path / "run" / "checkpoints")


def test_a_second_sigterm_is_not_impatience(tmp_path: Path, ids: Path) -> None:
    def strike(launcher: "subprocess.Popen[str]", workers: list[psutil.Process]) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            workers[0].send_signal(number)

    _, end, _, errors = stopped_launch(tmp_path, TWO, ids, 2, strike)
    check_stop(tmp_path, end, errors, "SIG")


def test_data_workers_leave_the_signals_to_their_trainer(tmp_path: Path, ids: Path) -> None:
    """A Ctrl-C in a terminal reaches every process of the foreground group, data workers too: one signal, not several."""

    def strike(launcher: "subprocess.Popen[str]", workers: list[psutil.Process]) -> None:
        for process in (*workers[0].children(), workers[0]):
            process.send_signal(signal.SIGINT)

    with_workers = (*ENDLESS, "--num_workers", "2")
    code, end, _, errors = stopped_launch(tmp_path, ("python",), ids, 1, strike, flags=with_workers)
    assert code == 75, "no launcher is between"
    check_stop(tmp_path, end, errors, "SIGINT")


def test_without_a_launcher_the_end_of_the_parent_means_nothing(tmp_path: Path, ids: Path) -> None:
    """`nohup python trainer/main.py &` in a shell that logs out."""
    folder = tmp_path / "run"
    command = f"nohup python {MAIN} --dataset {ids} --output_dir {folder} {' '.join(ENDLESS)} > /dev/null 2>&1 & echo $!"
    child = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment(), cwd=tmp_path)
    process = psutil.Process(int(child.stdout))
    try:
        wait_for("training", lambda: training(folder))
        assert process.ppid() != child.args
        process.send_signal(signal.SIGTERM)
        wait_for("the end", lambda: gone([process]), 15)
    finally:
        if process.is_running():
            process.kill()
    assert json.loads((folder / "exit.json").read_text())["reason"].startswith("SIGTERM")


def test_before_training_a_signal_ends_at_once(tmp_path: Path) -> None:
    """While the flags are read and the libraries imported there is nothing to save."""
    program = "import os, signal\nfrom trainer.runtime import run_command\nrun_command(lambda: os.kill(os.getpid(), signal.SIGTERM), print)"
    child = subprocess.run(
        ["python", "-c", program], capture_output=True, text=True, env=environment({"PYTHONPATH": str(ROOT)}), check=False
    )
    assert (child.returncode, child.stderr) == (75, "stopped: SIGTERM before the training began\n")


def test_max_time(tmp_path: Path, ids: Path) -> None:
    output = tmp_path / "run"
    with started(*TWO, MAIN, "--dataset", ids, "--output_dir", output, *ENDLESS, "--max_time", "00:00:02", cwd=tmp_path) as child:
        _, errors = child.communicate(timeout=LIMIT)
    check_stop(tmp_path, json.loads((output / "exit.json").read_text()), errors, "--max_time")


def test_a_restarted_group_does_not_train_on_after_a_stop(tmp_path: Path, ids: Path) -> None:
    """The elastic launcher takes exit code 75 for a failure and starts the group again."""
    launcher = (*TWO, "--max_restarts", "2")
    flags = (*ENDLESS, "--resume", "auto")
    _, end, out, errors = stopped_launch(tmp_path, launcher, ids, 2, to_worker(signal.SIGTERM, 0), flags=flags)
    assert end["code"] == 75
    assert out.count("processes 2") == 1, "it trained again"
    assert "had been stopped on request (SIGTERM" in errors
