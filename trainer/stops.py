"""Stopping on request: signals and other wishes of one rank, agreed by all ranks before any of them stops.

A signal may reach one process only, and a process that left the loop alone would leave the others waiting in a collective. So a
request is only noted; `Stops.agreed`, which every rank calls at every update and evaluation batch, makes it everybody's.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

NOT_FINITE, NOT_WRITTEN = "not finite", "checkpoint not written"
LAUNCHER_DIED, MAX_TIME, EARLY_STOPPING = "the launcher ended", "--max_time", "--early_stopping_patience"
# What a rank can ask for, the most urgent first.
REASONS = (NOT_FINITE, NOT_WRITTEN, "SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", LAUNCHER_DIED, MAX_TIME, EARLY_STOPPING)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# The kernel sends it when the launcher dies; nothing else uses it, so that it is never taken for a user's signal.
DEATH_SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
PR_SET_PDEATHSIG = 1
LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "torch.distributed.run", "torch.distributed.launch")


class Interrupted(KeyboardInterrupt):
    """A stop was asked for while there is nothing to save yet."""


class Stops:
    """What this rank wants to stop for, and what all ranks have agreed on.

    Attributes:
        training: signals are noted for `agreed`; before, they raise `Interrupted` wherever the main thread is,
        joined: or, with other ranks to consider, at the end of the next `Processes.together`.
        at_once: called, in a thread, when the user will not wait: a second SIGINT, or SIGTERM after SIGINT.
        in_program: this process goes on after the training (a notebook): a second SIGINT raises KeyboardInterrupt instead.
    """

    def __init__(self, in_program: bool = False) -> None:
        self.in_program = in_program
        self.requests: set[str] = set()
        self.training = self.joined = False
        self.at_once: Callable[[], None] = (lambda: None) if in_program else lambda: os._exit(1)
        self._interrupts = 0
        self._arrived: list[int] = []
        self._group: Any = None
        self._pending: tuple[Any, Any] | None = None
        self._previous: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._previous_fd = -1

    def request(self, reason: str) -> None:
        """Ask all ranks to stop for one of REASONS. Not a collective."""
        assert reason in REASONS
        self.requests.add(reason)

    def first_request(self) -> str | None:
        """The most urgent reason that this rank has. Not a collective."""
        return self._first([reason in self.requests for reason in REASONS]) if self.requests else None

    def join(self, group: Any) -> None:
        """Agree over `group`, a gloo group for this alone: its collectives run while the main thread is in other ones."""
        self._group = group

    def leave(self) -> None:
        """Let go of the group, and of what is still on its way in it."""
        self._group, self._pending = None, None

    def agreed(self) -> str | None:
        """The most urgent reason that any rank had at the call before this one; None to go on. A collective that does not wait.

        What the ranks say now is read at the next call, when it has long arrived: all of them stop at the same point, one call later.
        """
        if self._group is None:
            return self.first_request()
        before = self._finish()
        self._begin()
        return self._first(before)

    def agreed_now(self) -> str | None:
        """The most urgent reason that any rank has; a collective that waits."""
        if self._group is None:
            return self.first_request()
        before = self._finish()
        self._begin()
        return self._first([a or b for a, b in zip(before, self._finish(), strict=True)])

    def _begin(self) -> None:
        import torch
        import torch.distributed as dist

        flags = torch.tensor([reason in self.requests for reason in REASONS], dtype=torch.uint8)
        self._pending = (dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flags)

    def _finish(self) -> list[bool]:
        if self._pending is None:
            return [False] * len(REASONS)
        work, flags = self._pending
        self._pending = None
        work.wait()
        return [bool(flag) for flag in flags.tolist()]

    @staticmethod
    def _first(flags: list[bool]) -> str | None:
        return next((reason for reason, flag in zip(REASONS, flags, strict=True) if flag), None)

    def install(self) -> None:
        """Take over the stop signals, in the main thread; a signal that is ignored (nohup) stays ignored.

        Python runs its handlers between two bytecodes of the main thread, which may wait in a collective for ever. The byte that each
        signal writes into a socket reaches a thread of its own at any time.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        parent = os.getppid()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._sockets = (ours, theirs)
        self._previous_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._interrupt)
        if launcher_is_parent() and DEATH_SIGNAL is not None:
            self._previous[DEATH_SIGNAL] = signal.signal(DEATH_SIGNAL, self._interrupt)
            ask_for_signal_at_parents_death(DEATH_SIGNAL)
            if os.getppid() != parent:
                self.request(LAUNCHER_DIED)
        threading.Thread(target=self._listen, args=(ours, parent), name="stop signals", daemon=True).start()

    def remove(self) -> None:
        """Give the signals back."""
        if self._sockets is None:
            return
        if DEATH_SIGNAL in self._previous:
            ask_for_signal_at_parents_death(0)
        self.training = self.joined = False
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        # Ends the thread's wait.
        self._sockets[1].close()
        self._sockets = None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.training and not self.joined:
            raise Interrupted(LAUNCHER_DIED if number == DEATH_SIGNAL else signal.Signals(number).name)
        self._interrupts += number == signal.SIGINT
        if self.in_program and number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt

    def _listen(self, received: socket.socket, parent: int) -> None:
        with received:
            while numbers := received.recv(64):
                for number in numbers:
                    self._note(number, parent)

    def _note(self, number: int, parent: int) -> None:
        if number == DEATH_SIGNAL:
            # It comes when the thread that started this process ends, which need not be the end of the launcher.
            if os.getppid() != parent:
                self.request(LAUNCHER_DIED)
        elif number in STOP_SIGNALS:
            again = signal.SIGINT in self._arrived and number in (signal.SIGINT, signal.SIGTERM)
            self._arrived.append(number)
            self.request(signal.Signals(number).name)
            if again:
                self.at_once()


def leave_signals_to_trainer(worker: int = 0) -> None:
    """For a data worker process: stop signals are its trainer's to answer, whose death is its own end.

    A terminal, torchrun and Slurm send them to whole groups of processes; a worker that died of one would end the training with an error
    before it could stop in order. `Run.close` kills what does not end by itself.
    """
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ask_for_signal_at_parents_death(signal.SIGKILL)


def ask_for_signal_at_parents_death(number: int) -> None:
    """Have the kernel send this process `number` when its parent dies; 0 for none. On Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _in_a_fork() -> None:
    # Before the worker's own set-up runs, a signal would be written into the trainer's socket and counted there.
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_a_fork)


def launcher_is_parent() -> bool:
    """Whether `accelerate launch`, `torchrun` or the like started this process, and not a shell, whose end means nothing."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return False
    if "python" not in Path(words[0]).name:
        return False
    return any(Path(word).name in LAUNCHERS or word.startswith("accelerate.commands") for word in words[1:4])


def marker() -> Path:
    """The file that tells the launcher's next attempt that its training was stopped on request; named for the launcher."""
    import psutil

    parent = psutil.Process(os.getppid())
    name = f"trainer-stopped-{os.getuid()}-{parent.pid}-{parent.create_time():.2f}"
    return Path(tempfile.gettempdir(), name)


def restarted() -> bool:
    """Whether an elastic launcher started this process again, after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def leave_marker(reason: str) -> None:
    """Tell the next attempt of an elastic launcher, which takes every exit code but 0 for a failure, not to train on."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0"):
        with contextlib.suppress(OSError):
            marker().write_text(reason, encoding="utf-8")


def stopped_before() -> str | None:
    """Why the launcher's attempt before this one was stopped on request; None when it was not, or when there was none."""
    if not restarted():
        return None
    try:
        file = marker()
        return file.read_text(encoding="utf-8") if file.stat().st_uid == os.getuid() else None
    except OSError:
        return None
