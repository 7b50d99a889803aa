"""Ranks that agree, fail together, and refuse what would hang."""

import io
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from tests.helpers import ROOT
from tests.ranks import RankError, Ranks, alone, free_port, rank_environment
from trainer.config import Config, require_same
from trainer.runtime import (
    REFUSED_ENGINES,
    PeerError,
    Processes,
    UserError,
    env_int,
    launched_world_size,
    refuse_device,
    refuse_engines,
    run_command,
)
from trainer.stops import Interrupted


def fail_on_one(processes: Processes, rank: int, user: bool) -> tuple[str, str]:
    try:
        with processes.together():
            if processes.rank == rank:
                raise UserError("the disk is full") if user else OSError("the disk is full")
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_a_failure_on_one_rank_is_raised_on_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(fail_on_one, 1, True) == [("UserError", "the disk is full")] * 2
    assert two_ranks.run(fail_on_one, 1, False) == [("PeerError", "rank 1 failed"), ("OSError", "the disk is full")]
    assert two_ranks.run(fail_on_one, 7, True) == [("none", "")] * 2
    assert alone(fail_on_one, 0, True) == ("UserError", "the disk is full")


def first(processes: Processes, folder: Path, fail: bool) -> str:
    """Local rank 0 makes the file; the other one only finds it."""

    def work() -> str:
        file = folder / "prepared"
        if processes.rank == 0:
            if fail:
                raise UserError("the data set is not there")
            file.write_text("by rank 0")
        assert file.exists(), "the other rank did not wait"
        return file.read_text()

    try:
        return processes.local_main_first(work)
    except UserError as error:
        return f"refused: {error}"


def test_local_rank_zero_prepares_first_and_the_others_end_with_it(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(first, tmp_path, True) == ["refused: the data set is not there"] * 2
    assert two_ranks.run(first, tmp_path, False) == ["by rank 0"] * 2


def gathered(processes: Processes) -> tuple[list[int], int]:
    return processes.all_gather(processes.rank * 10), processes.broadcast(processes.rank + 5)


def test_gather_and_broadcast(two_ranks: Ranks) -> None:
    assert two_ranks.run(gathered) == [([0, 10], 5)] * 2
    assert alone(gathered) == ([0], 5)


@pytest.mark.parametrize("variable", sorted(REFUSED_ENGINES))
def test_other_engines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    refuse_engines()
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UserError, match=f"^{REFUSED_ENGINES[variable]} is not supported"):
        refuse_engines()


def test_other_devices_are_refused_with_the_way_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_device("cpu")
    refuse_device("cuda")
    with pytest.raises(UserError, match=r"'mps'.*accelerate launch --cpu"):
        refuse_device("mps")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    refuse_device("mps")


def test_a_world_without_its_other_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE is 2, but RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not set"):
        launched_world_size()
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"):
        launched_world_size()
    monkeypatch.setenv("RANK", "1")
    assert launched_world_size() == 2
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE must be a whole number, but is 'two'"):
        launched_world_size()


def test_env_int(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env_int("TRAINER_TEST", 7) == 7
    monkeypatch.setenv("TRAINER_TEST", "12")
    assert env_int("TRAINER_TEST", 7) == 12


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**variables, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as raised:
            run_command(lambda: None, lambda config, processes: None)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"the port of 127.0.0.1:{port} is in use" in message


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (UserError("no such file"), 2, "error: no such file\n"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
        (PeerError("rank 3 failed"), 1, ""),
    ],
)
def test_how_a_command_ends(capsys: pytest.CaptureFixture[str], failure: BaseException, code: int, text: str) -> None:
    ends: list[Any] = []

    def body(config: str, processes: Processes) -> None:
        assert config == "config"
        processes.at_exit.append(lambda code, reason: ends.append((code, reason)))
        raise failure

    with pytest.raises(SystemExit) as raised:
        run_command(lambda: "config", body)
    assert raised.value.code == code
    assert capsys.readouterr().err == text
    assert ends == [(code, str(failure) or "interrupted")]


@pytest.mark.parametrize("error", [OSError("the disk is full"), ValueError("a bug")])
def test_the_group_is_left_also_when_an_ending_fails(error: Exception) -> None:
    """What cannot be written at the end does not hinder the other endings; a bug does, and is shown."""
    ended: list[int] = []

    def body(config: str, processes: Processes) -> None:
        def fail(code: int, reason: str) -> None:
            raise error

        processes.at_exit += [fail, lambda code, reason: ended.append(code)]

    with pytest.raises(ValueError, match="a bug") if isinstance(error, ValueError) else nullcontext():
        run_command(lambda: "config", body)
    assert not PartialState._shared_state
    assert ended == ([] if isinstance(error, ValueError) else [0])


def test_an_end_that_cannot_be_told_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr's reader has gone, as in `... 2>&1 | head`."""
    ended: list[tuple[int, str]] = []

    def body(config: str, processes: Processes) -> None:
        processes.at_exit.append(lambda code, reason: ended.append((code, reason)))
        raise ZeroDivisionError("a bug")

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone())
        with pytest.raises(SystemExit) as raised:
            run_command(lambda: "config", body)
    assert raised.value.code == 1
    assert ended == [(1, "ZeroDivisionError: a bug")]


def signalled(processes: Processes) -> str:
    """Rank 1 alone is told to stop, before the training: all ranks learn it at their next common step."""
    processes.stops.joined = True
    if processes.rank == 1:
        processes.stops.request("SIGTERM")
    try:
        with processes.together():
            pass
    except Interrupted as stop:
        return str(stop)
    return "nothing"


def test_a_stop_before_training_is_agreed(two_ranks: Ranks) -> None:
    assert two_ranks.run(signalled) == ["SIGTERM", "SIGTERM"]


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def body(config: str, processes: Processes) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(SystemExit) as raised:
        run_command(lambda: "config", body)
    assert raised.value.code == 1
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


def both_ranks_mistaken(processes: Processes, port: int) -> int:
    """A whole command inside each rank, after leaving the group that the harness joined."""
    from trainer.runtime import leave_group

    leave_group(processes)
    os.environ["MASTER_PORT"] = str(port)

    def parse() -> None:
        raise UserError("unknown flag --lrr")

    with pytest.raises(SystemExit) as raised:
        run_command(parse, lambda config, processes: None)
    return int(str(raised.value.code))


def test_a_mistake_that_all_ranks_find_ends_all(two_ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    assert two_ranks.run(both_ranks_mistaken, free_port()) == [2, 2]


def group_left(processes: Processes) -> bool:
    import torch.distributed as dist

    from trainer.runtime import leave_group

    leave_group(processes)
    return dist.is_initialized()


def test_the_group_is_destroyed(two_ranks: Ranks) -> None:
    assert two_ranks.run(group_left) == [False, False]


def raises(processes: Processes) -> None:
    raise ValueError(f"rank {processes.rank}")


def test_the_harness_reports_a_failing_rank(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="ValueError: rank 0"):
        two_ranks.run(raises)
    assert json.dumps(two_ranks.run(gathered)[0]) == "[[0, 10], 5]"


def differ(processes: Processes, one: dict[str, Any], other: dict[str, Any]) -> str:
    try:
        require_same(Config(**(other if processes.rank else one)), processes)
    except UserError as error:
        return str(error)
    return ""


def test_hosts_with_different_flags_are_told(two_ranks: Ranks) -> None:
    sentence = "--lr is 0.1 on rank 0, but 0.2 on rank 1: give all hosts the same flags and recipe"
    assert two_ranks.run(differ, {"lr": 0.1}, {"lr": 0.2}) == [sentence, sentence]
    assert two_ranks.run(differ, {"output_dir": "a", "cpu_threads": 1}, {"output_dir": "b", "cpu_threads": 2}) == ["", ""]


def test_a_process_that_waits_for_others_says_so() -> None:
    """Nobody else comes: it would wait for half an hour."""
    code = "import trainer.runtime as runtime; runtime.PATIENCE = 0.2; runtime.join()"
    port = free_port()
    environment = {**os.environ, **rank_environment(0, 2, port)}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        line = next(line for line in child.stderr if line.startswith("rank "))
    finally:
        child.kill()
        child.wait()
    assert (
        f" waits at 127.0.0.1:{port} for the other processes, 2 in all, for 0 s now: start every host, each with its own --machine_rank"
        in line
    )
