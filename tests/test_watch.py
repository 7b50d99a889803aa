"""No silent hang: ranks that stop, sleep, raise or die, on real processes, and the verdict that names them."""

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port, rank_environment
from trainer.runtime import Processes
from trainer.watch import CLOSED, FAILED, GRACE, LOST, PHASES, RUNNING, Entry, Watch, _broke_a_collective, missing, rows

# Seconds: of --hang_timeout; from a fault to the end of the last process, beyond that; of anything at all.
HANG, SOON, LIMIT = 2.0, 10.0, 90.0
FOREVER = 600.0


# What the ranks run.


def step(processes: Processes, watch: Watch, number: int) -> None:
    import torch
    import torch.distributed as dist

    watch.at("forward", 1, number)
    time.sleep(0.002)
    watch.at("backward", 1, number)
    if processes.count > 1:
        dist.all_reduce(torch.ones(1))
    watch.at("update", 1, number)
    if number == 5:
        # The test may begin.
        Path(f"moving_{processes.rank}").write_text(f"{os.getpid()}")


def keep_moving(processes: Processes, watch: Watch) -> None:
    deadline, number = time.monotonic() + LIMIT, 0
    while time.monotonic() < deadline:
        step(processes, watch, number)
        number += 1


class Samples:
    """Numbers; that at `stuck` never comes."""

    def __init__(self, stuck: int | None) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return stuck_sample() if index == self.stuck else index


def stuck_sample() -> int:
    time.sleep(FOREVER)
    return 0


def sleeping_worker(processes: Processes, watch: Watch) -> None:
    """The last rank's."""
    from torch.utils.data import DataLoader

    watch.at("data", 1, 0)
    for number, _ in enumerate(DataLoader(Samples(8 if processes.rank == processes.count - 1 else None), num_workers=1, batch_size=1)):  # type: ignore[arg-type]
        step(processes, watch, number)
        watch.at("data", 1, number + 1)
    keep_moving(processes, watch)


def with_workers(processes: Processes, watch: Watch) -> None:
    """Each rank keeps a data worker, asleep, while it moves."""
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(Samples(1), num_workers=1, batch_size=1))  # type: ignore[arg-type]
    next(batches)
    keep_moving(processes, watch)


def rank_1_raises(processes: Processes, watch: Watch) -> None:
    for number in range(6):
        step(processes, watch, number)
    if processes.rank == 1:
        raise ValueError("the label 11 is not a class")


def raises(processes: Processes, watch: Watch) -> None:
    rank_1_raises(processes, watch)
    keep_moving(processes, watch)


def raises_while_others_block(processes: Processes, watch: Watch) -> None:
    """As with nccl, where nothing is raised in the others."""
    rank_1_raises(processes, watch)
    time.sleep(FOREVER)


def blocks(processes: Processes, watch: Watch) -> None:
    """Both ranks in something that does not raise when the other dies."""
    for number in range(6):
        step(processes, watch, number)
    time.sleep(FOREVER)


def holds_interpreter(processes: Processes, watch: Watch) -> None:
    for number in range(6):
        step(processes, watch, number)
    if processes.rank == 1:
        call_without_release()
    keep_moving(processes, watch)


def call_without_release() -> None:
    ctypes.PyDLL(None).sleep(int(FOREVER))


def sleeps_in_same_phase(processes: Processes, watch: Watch) -> None:
    """Both in the backward pass: one in its collective, the other before it."""
    for number in range(6):
        step(processes, watch, number)
    if processes.rank == 1:
        watch.at("forward", 1, 6)
        watch.at("backward", 1, 6)
        slow_gradient()
    keep_moving(processes, watch)


def slow_gradient() -> None:
    time.sleep(FOREVER)


def uneven(processes: Processes, watch: Watch) -> None:
    """Waits just shorter than the timeout, and a rank that goes on for longer than that after the other has ended."""
    for number in range(10):
        if number - 7 == processes.rank:
            time.sleep(0.6 * HANG)
        step(processes, watch, number)
    if processes.rank == int(os.environ["LATE"]):
        for number in range(4):
            watch.at("log", 1, number)
            time.sleep(0.4 * HANG)


def slow_with_no_limit(processes: Processes, watch: Watch) -> None:
    """Waits as long as is wanted, for another rank, and after one has ended in order."""
    late = processes.rank == int(os.environ["LATE"])
    step(processes, watch, 5)
    time.sleep(HANG if late else 0)
    step(processes, watch, 6)
    time.sleep(GRACE + 1.5 if late else 0)


def pauses(processes: Processes, watch: Watch) -> None:
    """Without progress for half of the timeout, as far as this process knows."""
    for number in range(6):
        step(processes, watch, number)
    for _ in range(10):
        time.sleep(0.05 * HANG)
    step(processes, watch, 6)


def strangers(processes: Processes, watch: Watch) -> None:
    """Programs that are not of this job connect to the hub, as if it were on another host, and send what they like."""
    step(processes, watch, 4)
    if processes.rank == 0:
        assert watch._listener is not None
        place = ("::1" if watch._listener.family == socket.AF_INET6 else "127.0.0.1", watch._listener.getsockname()[1])
        forged = json.dumps({"token": "", "entry": vars(watch._table[1]) | {"state": FAILED, "reason": "forged"}})
        for words in ("GET / HTTP/1.1", "[]", "{}", forged):
            with socket.create_connection(place, timeout=5) as stranger:
                stranger.sendall(f"{words}\n".encode())
                assert stranger.recv(1) == b"", words
        assert watch._table[1].state == RUNNING
        assert watch._first is None
    step(processes, watch, 5)


def rank_main(scenario: Callable[[Processes, Watch], None], folder: Path, timeout: float, environment: dict[str, str]) -> None:
    """A command as trainer.runtime runs it."""
    from trainer.runtime import join, leave_group

    # The data workers' start is not to be this process's own.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(os.open(f"stderr_{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    processes = join()
    watch = Watch(processes, timeout)
    watch.on_verdict = lambda reason: print(f"on_verdict: {reason}", file=sys.stderr, flush=True)
    code = 0
    try:
        watch.at("start", 0, 0)
        watch.start(folder)
        scenario(processes, watch)
    except Exception as error:
        code = 1
        sentence = watch.explain(error)
        if sentence is None:
            traceback.print_exc()
            watch.failed(f"{type(error).__name__}: {error}")
        elif watch.speaks:
            print(f"error: {sentence}", file=sys.stderr, flush=True)
    finally:
        leave_group(processes)
        watch.close()
        watch.close()
    sys.exit(code)


# What the tests see of them.


def alive(process: psutil.Process) -> bool:
    """Whether it is, or is still after a moment; a dead one that nobody has waited for is not."""
    with suppress(psutil.Error):
        for _ in range(20):
            if process.status() == psutil.STATUS_ZOMBIE or not process.is_running():
                return False
            time.sleep(0.05)
        return True
    return False


class Job:
    """The ranks of a job, and every process that they started."""

    def __init__(
        self, scenario: Callable[[Processes, Watch], None], folder: Path, count: int, timeout: float, late: int, local: int
    ) -> None:
        self.folder, self.count = folder, count
        self.children = []
        # Forked from a process that has loaded what takes seconds, and has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["accelerate", "torch.utils.data", "tests.test_watch"])
        port = free_port()
        for rank in range(count):
            environment = {
                **rank_environment(rank, count, port),
                "CUDA_VISIBLE_DEVICES": "",
                "LATE": str(late),
                "LOCAL_WORLD_SIZE": str(local),
            }
            child = context.Process(target=rank_main, args=(scenario, folder, timeout, environment))
            child.start()
            self.children.append(child)
        self.seen: list[psutil.Process] = []
        self.begun = 0.0

    def moving(self) -> None:
        """Wait until all ranks are in the loop."""
        deadline = time.monotonic() + LIMIT
        while not all((self.folder / f"moving_{rank}").exists() for rank in range(self.count)):
            assert time.monotonic() < deadline, self.errors()
            assert all(child.exitcode is None for child in self.children), self.errors()
            time.sleep(0.01)
        self.see()
        self.begun = time.monotonic()

    def see(self) -> None:
        """Remember what the ranks have started."""
        for child in self.children:
            with suppress(psutil.Error):
                self.seen += [process for process in psutil.Process(child.pid).children(recursive=True) if process not in self.seen]

    def ended(self, within: float) -> list[int | None]:
        """The exit codes, once all have ended, within so many seconds of `moving`; and nothing is left."""
        deadline = self.begun + within
        while any(child.exitcode is None for child in self.children):
            self.see()
            assert time.monotonic() < deadline, f"not ended within {within} s: {self.errors()}"
            time.sleep(0.02)
        assert not [process for process in self.seen if alive(process)]
        print(f"ended after {time.monotonic() - self.begun:.1f} s")
        return [child.exitcode for child in self.children]

    def said(self, within: float) -> None:
        """Wait until a rank has printed an error."""
        while not any("error: " in text for text in self.errors().values()):
            assert time.monotonic() < self.begun + within, self.errors()
            time.sleep(0.01)
        print(f"said after {time.monotonic() - self.begun:.1f} s")

    def errors(self) -> dict[int, str]:
        return {rank: (self.folder / f"stderr_{rank}").read_text(encoding="utf-8") for rank in range(self.count)}

    def verdict(self, speaker: int) -> list[str]:
        """The lines from "error: " on, which one rank alone prints."""
        errors = self.errors()
        assert [rank for rank, text in errors.items() if "error: " in text] == [speaker], errors
        lines = errors[speaker].splitlines()
        return [line for line in lines[next(i for i, line in enumerate(lines) if line.startswith("error: ")) :] if "on_verdict" not in line]

    def told(self) -> list[int]:
        """The ranks whose on_verdict was called."""
        return [rank for rank, text in self.errors().items() if "on_verdict: " in text]

    def stacks(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")

    def workers(self, rank: int) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.pid(rank)).children(recursive=True) if child.name() == "pt_data_worker"]

    def pid(self, rank: int) -> int:
        pid = self.children[rank].pid
        assert pid is not None
        return pid


@contextmanager
def job(
    scenario: Callable[[Processes, Watch], None],
    folder: Path,
    count: int = 2,
    timeout: float = HANG,
    late: int = 0,
    local: int | None = None,
) -> Iterator[Job]:
    running = Job(scenario, folder, count, timeout, late, local or count)
    try:
        yield running
    finally:
        running.see()
        for child in running.children:
            child.kill()
            child.join()
        for process in running.seen:
            with suppress(psutil.Error):
                process.kill()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank(tmp_path: Path, stopped: int) -> None:
    (tmp_path / "train.log").write_text("before\n", encoding="utf-8")
    with job(keep_moving, tmp_path) as ranks:
        ranks.moving()
        os.kill(ranks.pid(stopped), signal.SIGSTOP)
        codes = ranks.ended(within=HANG + SOON)
        other = 1 - stopped
        assert codes[stopped] != 0
        assert codes[other] == 1
        lines = ranks.verdict(speaker=other)
        assert lines[0] == f"error: no progress for {HANG:g} s (--hang_timeout): rank {stopped} did not arrive"
        assert lines[1 + other].startswith(f"rank {other} waits in the backward pass, epoch 1, step ")
        assert lines[1 + stopped].startswith(f"rank {stopped} is missing: last seen in the ")
        assert lines[3] == f"rank {stopped}: its process {ranks.pid(stopped)} is stopped"
        assert lines[4].startswith(f"stacks of all ranks: {tmp_path}/logs/rank_*.log")
        assert "in keep_moving" in ranks.stacks(stopped), "written by the stopped process itself"
        assert "in all_reduce" in ranks.stacks(other)
        assert other in ranks.told()
        assert (tmp_path / "train.log").read_text(encoding="utf-8").splitlines() == ["before", *lines]


def test_a_sleeping_data_worker(tmp_path: Path) -> None:
    with job(sleeping_worker, tmp_path, count=3) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + SOON) == [1, 1, 1]
        assert len(ranks.seen) >= 3, "the data workers were seen, and are gone"
        lines = ranks.verdict(speaker=0)
        assert lines[0].endswith("rank 2 did not arrive")
        assert lines[1] == "rank 0 waits in the backward pass, epoch 1, step 8"
        assert lines[2] == "rank 1 waits in the backward pass, epoch 1, step 8"
        assert lines[3].startswith("rank 2 is missing: last seen in the data loader, epoch 1, step 8, at tests/test_watch.py:")
        assert "sleeping_worker (in " in lines[3]
        assert "in sleeping_worker" in ranks.stacks(2)
        assert "in stuck_sample" in ranks.stacks(2), "the worker's own stack"
        assert "in stuck_sample" not in ranks.stacks(1)
        assert ranks.told() == [0, 1, 2]


def test_one_process_alone_with_a_stuck_worker(tmp_path: Path) -> None:
    with job(sleeping_worker, tmp_path, count=1) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + SOON) == [1]
        assert ranks.seen
        lines = ranks.verdict(speaker=0)
        assert lines[0] == f"error: no progress for {HANG:g} s (--hang_timeout): rank 0 did not arrive"
        assert lines[1].startswith("rank 0 is missing: last seen in the data loader, epoch 1, step 8, at tests/test_watch.py:")
        assert "in stuck_sample" in ranks.stacks(0)


def test_a_rank_that_holds_its_interpreter(tmp_path: Path) -> None:
    with job(holds_interpreter, tmp_path) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + SOON) == [1, -signal.SIGKILL]
        lines = ranks.verdict(speaker=0)
        assert lines[0].endswith("rank 1 did not arrive")
        assert lines[3] == f"rank 1: its process {ranks.pid(1)} does not answer"
        assert "in call_without_release" in ranks.stacks(1)


def test_ranks_in_the_same_phase(tmp_path: Path) -> None:
    with job(sleeps_in_same_phase, tmp_path) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + SOON) == [1, 1]
        lines = ranks.verdict(speaker=0)
        assert lines[0].endswith("rank 1 did not arrive")
        assert lines[1] == "rank 0 waits in the backward pass, epoch 1, step 0" or "step 6" in lines[1]
        assert "slow_gradient" in lines[2]


def test_all_ranks_at_the_same_place(tmp_path: Path) -> None:
    with job(blocks, tmp_path) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + SOON) == [1, 1]
        lines = ranks.verdict(speaker=0)
        assert lines[0].endswith("no rank is known to wait for another")
        assert [line.split(", at ")[0] for line in lines[1:3]] == [
            f"rank {rank} is in the optimizer update, epoch 1, step 5" for rank in (0, 1)
        ]


def test_a_rank_that_raises_while_others_are_in_a_collective(tmp_path: Path) -> None:
    with job(raises, tmp_path, count=3, timeout=300) as ranks:
        ranks.moving()
        assert ranks.ended(within=SOON) == [1, 1, 1]
        errors = ranks.errors()
        assert "error: rank 1 failed: ValueError: the label 11 is not a class" in errors[0]
        assert "ValueError: the label 11 is not a class" in errors[1]
        assert "rror" not in errors[2], "one rank alone speaks"
        assert ranks.told() == [], "the exception came first"


def test_a_rank_that_raises_while_others_block(tmp_path: Path) -> None:
    with job(raises_while_others_block, tmp_path, timeout=300) as ranks:
        ranks.moving()
        assert ranks.ended(within=SOON) == [1, 1]
        assert "error: rank 1 failed: ValueError: the label 11 is not a class\n" in ranks.errors()[0]
        assert ranks.told() == [0]
        assert "in raises_while_others_block" in ranks.stacks(0)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_with_a_data_worker(tmp_path: Path, killed: int) -> None:
    with job(with_workers, tmp_path, timeout=300) as ranks:
        ranks.moving()
        (worker,) = ranks.workers(killed)
        # Until the others know of the worker, which would hold the dead rank's connections open.
        time.sleep(2.5)
        ranks.begun = time.monotonic()
        os.kill(ranks.pid(killed), signal.SIGKILL)
        ranks.said(within=3.0)
        codes = ranks.ended(within=SOON)
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] == 1
        assert not alive(worker), "the worker that it left behind"
        line = ranks.verdict(speaker=1 - killed)[0]
        assert line.startswith(
            f"error: rank {killed} was killed, crashed or ran out of memory (its process {ranks.pid(killed)} is gone): last"
        )


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_while_the_other_blocks(tmp_path: Path, killed: int) -> None:
    with job(blocks, tmp_path, timeout=0) as ranks:
        ranks.moving()
        os.kill(ranks.pid(killed), signal.SIGKILL)
        assert ranks.ended(within=SOON)[1 - killed] == 1
        assert ranks.verdict(speaker=1 - killed)[0].startswith(f"error: rank {killed} was killed, crashed")
        assert ranks.told() == [1 - killed]


@pytest.mark.parametrize("late", [0, 1])
def test_uneven_ranks_and_an_ordinary_end(tmp_path: Path, late: int) -> None:
    with job(uneven, tmp_path, late=late) as ranks:
        ranks.moving()
        assert ranks.ended(within=3 * HANG + SOON) == [0, 0]
        assert ranks.errors() == {0: "", 1: ""}
        assert not (tmp_path / "logs").exists(), "no empty files are left"


@pytest.mark.parametrize("late", [0, 1])
def test_no_limit(tmp_path: Path, late: int) -> None:
    with job(slow_with_no_limit, tmp_path, timeout=0, late=late) as ranks:
        ranks.moving()
        assert ranks.ended(within=HANG + GRACE + SOON) == [0, 0]
        assert ranks.errors() == {0: "", 1: ""}


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    with job(pauses, tmp_path) as ranks:
        ranks.moving()
        # Until the pause is known.
        time.sleep(0.25 * HANG)
        for signal_number, seconds in ((signal.SIGSTOP, 1.5 * HANG), (signal.SIGCONT, 0.0)):
            for rank in (0, 1):
                os.kill(ranks.pid(rank), signal_number)
            time.sleep(seconds)
        assert ranks.ended(within=2 * HANG + SOON) == [0, 0]
        assert ranks.errors() == {0: "", 1: ""}


def test_strangers_are_not_heard(tmp_path: Path) -> None:
    with job(strangers, tmp_path, timeout=300, local=1) as ranks:
        ranks.begun = time.monotonic()
        assert ranks.ended(within=LIMIT) == [0, 0]
        assert ranks.errors() == {0: "", 1: ""}


# What needs no process.


def entries(*counters: int, **fields: Sequence[object]) -> dict[int, Entry]:
    table = {rank: Entry(rank, 100 + rank, 0.0, "host", counter, "backward", 1, 7) for rank, counter in enumerate(counters)}
    for name, values in fields.items():
        for rank, value in enumerate(values):
            setattr(table[rank], name, value)
    return table


def test_who_is_missing() -> None:
    assert missing(entries(7, 6, 7), []) == [1], "behind in the program"
    assert missing(entries(7, 6, 7), [2]) == [2], "silence is the stronger sign"
    assert missing(entries(7, 6, 6, waits=(True, True, False)), []) == [2], "of those behind, the one that waits for nobody"
    assert missing(entries(7, 6, 6), []) == [1, 2], "as on nccl, where the frames do not tell"
    assert missing(entries(6, 6, 6, waits=(True, False, True)), []) == [1]
    assert missing(entries(6, 6), []) == []
    assert missing(entries(6, 6, waits=(True, True)), []) == []
    assert missing(entries(6), []) == [0]


def test_many_ranks_share_lines() -> None:
    table = entries(*[7] * 9, 6, *[7] * 3, waits=[True] * 13)
    table[11].phase = "gather"
    assert rows(table, [9]) == [
        "ranks 0-8, 10, 12 wait in the backward pass, epoch 1, step 7",
        "rank 9 is missing: last seen in the backward pass, epoch 1, step 7",
        "rank 11 waits in the gathering of the evaluation's results, epoch 1, step 7",
    ]


def test_ranks_that_ended() -> None:
    assert rows(entries(7, 7, 7, state=(CLOSED, FAILED, LOST)), []) == [
        "rank 0 has ended in order",
        "rank 1 failed in the backward pass, epoch 1, step 7",
        "rank 2 was lost in the backward pass, epoch 1, step 7",
    ]


def test_which_errors_are_a_broken_collective() -> None:
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    assert _broke_a_collective(gloo)
    follows = ValueError("no metrics")
    follows.__cause__ = gloo
    assert _broke_a_collective(follows)
    assert not _broke_a_collective(ValueError("gloo"))
    assert not _broke_a_collective(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."))


def test_before_start_nothing_happens() -> None:
    class Alone:
        rank, count = 0, 1

    watch = Watch(Alone(), 1.0)  # type: ignore[arg-type]
    watch.at("forward", 1, 2)
    watch.failed("no")
    assert watch.explain(RuntimeError("gloo")) is None
    watch.close()
    assert (watch.phase, watch.epoch, watch.step, watch.counter) == ("forward", 1, 2, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_phases_read_well() -> None:
    assert all(text.startswith("the ") for text in PHASES.values())
