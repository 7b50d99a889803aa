"""Two hosts for real, as network namespaces: README's commands as they stand there, a link that is cut, stops and resumes across hosts."""

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, write_ids
from tests.hosts import Host, Hosts, missing_tools, two_hosts, wait_for_ends
from tests.launching import CONFIGS, MAIN, environment
from tests.ranks import Ranks
from tests.test_stops import training, wait_for, workers_of
from trainer.checkpoint import listed
from trainer.main import main

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(missing_tools() is not None, reason=missing_tools() or "")]

COMMANDS = dict(re.findall(r"<!-- hosts: (\w+) -->\n```sh\n(.*?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL))
# At a constant rate a training is a part of each longer one.
FLAGS = ("--batch_size", "8", "--lr_scheduler", "constant", "--warmup_epochs", "0", "--cpu_threads", "1", "--log_interval", "50")
ENDLESS = ("--epochs", "100000", "--checkpointing_steps", "8")
SECONDS = 60.0


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 16)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def reference(ranks: Ranks, folder: Path, ids: Path, epochs: int) -> Path:
    """The same training on two processes of this host, never stopped."""
    flags = [
        "--dataset",
        str(ids),
        *FLAGS,
        "--epochs",
        str(epochs),
        "--checkpointing_steps",
        "8",
        "--output_dir",
        str(folder / "reference"),
    ]
    ranks.run_apart(main, flags)
    return folder / "reference"


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, buffers and optimizer to the byte, and all that was measured."""
    ends = [listed(run / "checkpoints")[-1] for run in (one, other)]
    assert ends[0].name == ends[1].name
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes(), file
    results = [json.loads((run / "results.json").read_text(encoding="utf-8")) for run in (one, other)]
    for name in ("acc1", "acc5", "loss", "best_acc1", "samples", "confusion", "step"):
        assert results[0][name] == results[1][name], name


def start(hosts: Hosts, way: str, folder: Path, ids: Path, *flags: str) -> "list[subprocess.Popen[str]]":
    """README's command on both hosts."""
    words = shlex.join(("--dataset", str(ids), *FLAGS, *flags))
    variables = {"MASTER": hosts.a.address, "SHARED": str(folder), "CONFIG": str(CONFIGS / "multi_cpu.yaml")}
    return [
        host.popen("bash", "-c", f"exec {COMMANDS[way]} {words}", cwd=ROOT, variables=variables | {"HOST": str(number)})
        for number, host in enumerate(hosts)
    ]


def sentences(errors: str) -> list[str]:
    return re.findall(r"^error: (.*)", errors, re.MULTILINE)


def end_of(folder: Path) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((folder / "run" / "exit.json").read_text(encoding="utf-8"))
    return end


def stop_one(child: "subprocess.Popen[str]", number: signal.Signals) -> None:
    launcher = workers_of(child)[0].parent()
    assert launcher is not None
    launcher.send_signal(number)


def has_checkpoint(folder: Path) -> bool:
    return training(folder) and bool(listed(folder / "checkpoints"))


def test_cut_stopped_and_gone_on_with(hosts: Hosts, ids: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    run = tmp_path / "run"
    # The link is cut: each side names the other.
    children = start(hosts, "accelerate", tmp_path, ids, *ENDLESS, "--hang_timeout", "3")
    try:
        wait_for("a checkpoint", lambda: has_checkpoint(run))
        hosts.cut()
        cut = time.monotonic()
        ends = wait_for_ends(*children, seconds=30)
    finally:
        hosts.mend()
        for child in children:
            child.kill()
    assert time.monotonic() - cut < 20
    for (code, _, errors), lost, other in zip(ends, (1, 0), ("second", "first"), strict=True):
        assert code != 0
        assert sentences(errors) == [f"no progress for 3 s (--hang_timeout): rank {lost} on host {other} did not arrive"]
        assert f"on host {other}: the process is stopped, or the host or the network to it is down" in errors
        assert "trainer/" not in errors.partition("error: ")[0], "a traceback before the sentence"
    assert (end_of(tmp_path)["code"], end_of(tmp_path)["resumable"]) == (1, True)

    # Slurm's way goes on with it, until one of the hosts is told to stop.
    job = slurm_job(hosts, tmp_path, "--dataset", str(ids), *FLAGS, *ENDLESS)
    try:
        wait_for("training", lambda: not (run / "exit.json").exists() and len(workers_of(job)) == 2, 30)
        reached = listed(run / "checkpoints")[-1].name
        wait_for("a later checkpoint", lambda: listed(run / "checkpoints")[-1].name > reached)
        first_host = workers_of(job)[0].parent()
        assert first_host is not None
        first_host.send_signal(signal.SIGUSR1)
        [(code, out, errors)] = wait_for_ends(job, seconds=30)
    finally:
        job.kill()
    assert code == 75, errors
    assert "resume from " in out
    end = end_of(tmp_path)
    assert (end["code"], end["resumable"]) == (75, True)
    assert (tmp_path / "scontrol.txt").read_text(encoding="utf-8") == "requeue 4711\n"

    # torchrun's brings it to its end, which is that of a run that was never cut or stopped.
    epochs = end["step"] // 4 + 2
    ends = wait_for_ends(*start(hosts, "torchrun", tmp_path, ids, "--epochs", str(epochs)), seconds=SECONDS)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"epochs 100000 -> {epochs}" in ends[0][1]
    assert ends[1][1] == "", "the main process alone prints"
    assert_same_end(run, reference(two_ranks, tmp_path, ids, epochs))


def slurm_job(hosts: Hosts, folder: Path, *flags: str) -> "subprocess.Popen[str]":
    """slurm.sbatch, with stand-ins: srun starts its command on both hosts, scontrol names them, or writes down what it is asked for."""
    tools = folder / "tools"
    tools.mkdir()
    tasks = "\n".join(f'SLURM_NODEID={number} {shlex.join(host.command())} "$@" &' for number, host in enumerate(hosts))
    names = "\\n".join(host.name for host in hosts)
    texts = {
        "srun": f"{tasks}\nwait %1; code=$?; wait %2 || code=$?; exit $code",
        "scontrol": f'if [ "$1" = show ]; then printf "{names}\\n"; else echo "$@" >> {folder}/scontrol.txt; fi',
    }
    for name, text in texts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    assert COMMANDS["slurm"].startswith("sbatch --nodes 2 accelerate_configs/slurm.sbatch ")
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "two",
        "CONFIG_FILE": str(CONFIGS / "multi_cpu.yaml"),
        "OUTPUT_DIR": str(folder / "run"),
    }
    known = environment(variables)
    return subprocess.Popen(
        ["bash", CONFIGS / "slurm.sbatch", *flags],
        cwd=ROOT,
        env={**known, "PATH": f"{tools}:{known['PATH']}"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_c10d_and_folders_that_are_not_shared(hosts: Hosts, ids: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    """Each host in a working directory of its own, of which only rank 0's gets a run; then the other one is ahead."""
    end = wait_for_ends(*apart(hosts, tmp_path, ids, "--epochs", "2", "--checkpointing_steps", "8"), seconds=SECONDS)
    assert [code for code, _, _ in end] == [0, 0], end
    (run,) = [folder / "run" for folder in (tmp_path / "first", tmp_path / "second") if (folder / "run" / "results.json").exists()]
    assert_same_end(run, reference(two_ranks, tmp_path, ids, 2))
    # As when the rendezvous gives rank 0 to the other host.
    other = tmp_path / ({"first", "second"} - {run.parent.name}).pop()
    for folder in (run.parent, other):
        (folder / "run").rename(folder / "old") if (folder / "run").exists() else None
    for folder in (tmp_path / "first", tmp_path / "second"):
        (folder / "run").mkdir()
    (tmp_path / "second" / "run" / "checkpoints" / "step_00000008").mkdir(parents=True)
    ends = wait_for_ends(*apart(hosts, tmp_path, ids, "--resume", "auto", "--epochs", "3", static=True), seconds=SECONDS)
    assert all(code != 0 for code, _, _ in ends)
    assert sentences(ends[0][2]) == [
        "--resume auto: on host first, where rank 0 is, run has no checkpoint, but on host second step_00000008: make --output_dir a "
        "folder that all hosts share, or start with the hosts' ranks as they were"
    ]


def apart(hosts: Hosts, folder: Path, ids: Path, *flags: str, static: bool = False) -> "list[subprocess.Popen[str]]":
    def one(host: Host, number: int) -> "subprocess.Popen[str]":
        (folder / host.name).mkdir(exist_ok=True)
        rendezvous = () if static else ("--rdzv_backend", "c10d")
        where = ("--machine_rank", str(number), "--main_process_ip", hosts.a.address, "--main_process_port", "29501", *rendezvous)
        launcher = (
            "accelerate",
            "launch",
            "--config_file",
            CONFIGS / "multi_cpu.yaml",
            "--num_machines",
            "2",
            "--num_processes",
            "2",
            *where,
        )
        return host.popen(*launcher, MAIN, "--dataset", ids, *FLAGS, "--output_dir", "run", *flags, cwd=folder / host.name)

    return [one(host, number) for number, host in enumerate(hosts)]
