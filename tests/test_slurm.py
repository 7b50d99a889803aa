"""The Slurm habit: SIGUSR1 before the time limit, a checkpoint, into the queue again, on to the end. Slurm's own commands are stand-ins."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, write_ids
from tests.launching import CONFIGS, environment
from tests.test_stops import training, wait_for, workers_of


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """srun runs its command in place; scontrol writes down what it is asked for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" >> {tmp_path}/scontrol.txt')):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    config = tmp_path / "config.yaml"
    config.write_text((CONFIGS / "multi_cpu.yaml").read_text() + "main_process_port: 0\n")
    variables = environment({"SLURM_JOB_ID": "4711", "CONFIG_FILE": str(config), "OUTPUT_DIR": str(tmp_path / "run")})
    return {**variables, "PATH": f"{tools}{os.pathsep}{variables['PATH']}"}


def job(slurm: dict[str, str], *flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", CONFIGS / "slurm.sbatch", *flags], cwd=ROOT, env=slurm, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_stopped_requeued_resumed(tmp_path: Path, slurm: dict[str, str]) -> None:
    dataset = str(write_ids(tmp_path / "ids", 64, 16))
    first = job(slurm, "--dataset", dataset, "--batch_size", "8", "--epochs", "100000", "--checkpointing_steps", "1000000")
    try:
        wait_for("training", lambda: training(tmp_path / "run"))
        launcher: Any = workers_of(first)[0].parent()
        launcher.send_signal(signal.SIGUSR1)
        assert first.wait(60) == 75
    finally:
        first.kill()
    end = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (end["code"], end["resumable"]) == (75, True)
    assert end["reason"].startswith("SIGUSR1")
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    epochs = str(end["step"] // 4 + 2)
    again = job(slurm, "--dataset", dataset, "--batch_size", "8", "--epochs", epochs)
    out, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert f"resume from {tmp_path}/run/checkpoints/step_{end['step']:08d}" in out
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n", "a finished job is not put into the queue again"


def test_the_script_says_what_it_is() -> None:
    lines = (CONFIGS / "slurm.sbatch").read_text().splitlines()
    assert lines[2].startswith("# sbatch accelerate_configs/slurm.sbatch ")
    assert "#SBATCH --signal=USR1@120" in lines
    assert any(line.startswith("export PET_SIGNALS_TO_HANDLE=") and "SIGUSR1" in line for line in lines)
