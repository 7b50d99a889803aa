"""No silent hang: every rank publishes where it is, and when one does not arrive, or dies, all end and say which, and where.

Rank 0's watching thread is the hub: each other rank's thread holds one TCP connection to it, sends its entry about once a second,
and gets all entries back. The kernel closes the connection of a killed process at once, so that the death of a rank shows within
milliseconds; that of a host after LOST_HOST seconds; a stopped process keeps its connection and shows by its silence. Nothing here
uses the process group once `start` has returned: with nccl a collective that lacks a rank does not raise, it blocks.

A verdict is passed by the hub, or, when rank 0 is silent, by every other rank for itself. The ranks then write their stacks and
end; one that cannot do so itself is made to by a rank of its host.
"""

import faulthandler
import json
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from trainer.process import find_process
from trainer.runtime import Processes, UserError

# What `Watch.at` marks, as it stands after "waits in" and "last seen in".
PHASES = {
    "start": "the start of training",
    "data": "the data loader",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "update": "the optimizer update",
    "averaging": "the averaging of --local_sgd_steps",
    "agree": "the agreement on stopping",
    "evaluation data": "the evaluation's data loader",
    "evaluation forward": "the evaluation's forward pass",
    "gather": "the gathering of the evaluation's results",
    "checkpoint": "the checkpoint",
    "log": "the logging",
    "audit": "the audit of the ranks",
    "report": "the report",
}
# A rank's states: at work; ended by an error of its own; ended since another did; gone without a word; ended in order; stacks written.
RUNNING, FAILED, ENDED, LOST, CLOSED, DUMPED = "running", "failed", "ended", "lost", "closed", "dumped"

# Seconds. GRACE: for the ordinary way out, an exception, once another rank is known to have failed. LEAVING: for the end of a rank
# that reported its error. BACKSTOP: for the end after a verdict, should a disk or a pipe block it.
GRACE, LEAVING, BACKSTOP, LOST_HOST, CONNECT = 5.0, 30.0, 15.0, 60.0, 30.0
# Makes a process write the stacks of its threads, by faulthandler's C code, also when its interpreter is held.
STACKS_SIGNAL: int | None = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
EACH_RANK_A_LINE = 8
ROOT = Path(__file__).resolve().parent
LIBRARY = sysconfig.get_paths()["stdlib"]
# Innermost frames of a thread that waits for other ranks, or for the device that waits for them.
WAITING = re.compile(
    r"/torch/(distributed|nn/parallel)/|/torch/autograd/graph\.py:_engine_run_backward|/torch/cuda/.*:synchronize$|/trainer/shared_gather\.py:"
)
BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|connection closed by peer|connection reset by peer|broken pipe", re.IGNORECASE)


@dataclass
class Entry:
    """What a rank publishes about itself.

    Attributes:
        born: when its process started, so that a reused pid is not taken for it.
        host: the same for two processes that see each other's pids.
        counter: calls of `at`; the same at the same place on all ranks.
        frame: where its main thread is in Python, and `waits`: in a collective, as far as that shows; only while it makes no progress.
        told: its exit code, when it says itself, in a sentence, why it fails; 0 when others have to.
        children: [pid, born] of its data workers and other children.
    """

    rank: int
    pid: int
    born: float
    host: str
    counter: int = 0
    phase: str = "start"
    epoch: int = 0
    step: int = 0
    frame: str = ""
    waits: bool = False
    state: str = RUNNING
    reason: str = ""
    told: int = 0
    children: list[tuple[int, float]] = field(default_factory=list)

    @property
    def host_name(self) -> str:
        return self.host.partition(" ")[0]

    @property
    def place(self) -> str:
        return f"{PHASES.get(self.phase, self.phase)}, epoch {self.epoch}, step {self.step}"

    @property
    def sight(self) -> str:
        return f"{self.place}, at {self.frame}" if self.frame else self.place


class Line:
    """A connection that carries JSON, a message a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank: int | None = None
        self._buffer = b""
        connection.settimeout(1.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # At most a few messages are ever unread, so that these tell a dead host (no answer) from a stopped process (its kernel answers).
        third = int(LOST_HOST / 3)
        for option, value in (("KEEPIDLE", third), ("KEEPINTVL", third), ("KEEPCNT", 2), ("USER_TIMEOUT", int(LOST_HOST * 1000))):
            if hasattr(socket, f"TCP_{option}"):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send; what cannot be sent shows when the other end is read."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that came; None when the other end is gone or speaks another language."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            return [dict(json.loads(line)) for line in lines] if data and len(self._buffer) < 1 << 24 else None
        except TimeoutError:
            return []
        except (OSError, ValueError, TypeError):
            return None


class Watch:
    """This rank's part in the watch over all ranks.

    Attributes:
        on_verdict: called as `on_verdict(reason)` on every rank, in the watching thread, before a verdict ends the process; a rank
            that does not answer any more is killed without.
    """

    def __init__(self, processes: Processes, timeout: float) -> None:
        """`timeout`: seconds without progress on any rank until the verdict; 0 for none, while failures of other ranks end this one."""
        self.on_verdict: Callable[[str], None] | None = None
        self.phase, self.epoch, self.step, self.counter = "start", 0, 0, 0
        self._processes, self._timeout = processes, timeout
        self.rank, self.count = processes.rank, processes.count
        self._beat = max(0.1, min(1.0, timeout / 5)) if timeout else 1.0
        self._silence = min(10.0, max(timeout / 2, 2.5 * self._beat)) if timeout else 10.0
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._output_dir = Path()
        self._log: int | None = None
        self._token = ""
        self._listener: socket.socket | None = None
        # To the hub; the hub's own are in _lines.
        self._line: Line | None = None
        self._lines: list[Line] = []
        self._asked = False
        self._table: dict[int, Entry] = {}
        # This process's own clock, in seconds: it stands still while the process does, so that a job that was stopped as a whole and
        # continued is not late. When each rank last moved, and was last heard of, on it.
        self._now, self._moment = 0.0, 0.0
        self._moved: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._state, self._reason, self._told, self._turned = RUNNING, "", 0, 0.0
        self._published = RUNNING
        self._first: int | None = None
        self._first_at = 0.0
        self._silent: frozenset[int] = frozenset()
        self._rung = self._stopping = self._ending = False
        self._news, self._settled = threading.Event(), threading.Event()

    def at(self, phase: str, epoch: int, step: int) -> None:
        """Mark where this rank is, a key of PHASES; called in the same order on all ranks. Costs some 0.1 us."""
        self.phase, self.epoch, self.step = phase, epoch, step
        self.counter += 1

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that prints what all know: the lowest that is neither failed, lost nor silent."""
        able = (rank for rank, entry in self._table.items() if rank not in self._silent and entry.state not in (FAILED, LOST, CLOSED))
        return self.rank == min(able, default=0)

    @property
    def told(self) -> int:
        """The exit code of the rank that failed first, when it says itself, in a sentence, why; 0 when it does not, or none failed."""
        return self._table[self._first].told if self._first is not None else 0

    def start(self, output_dir: Path) -> None:
        """Connect the ranks and begin to watch the calling thread. A collective.

        Raises:
            UserError: the stacks' file cannot be opened, or a rank cannot reach rank 0.
        """
        self._output_dir, self._watched = output_dir.absolute(), threading.get_ident()
        me = psutil.Process()
        self._table[self.rank] = Entry(self.rank, me.pid, me.create_time(), _host())
        self._moved[self.rank], self._moment = 0.0, time.monotonic()
        alone = self._processes.control is None
        with self._processes.together():
            self._open_log()
            if self.rank == 0 and not alone:
                self._listen_on()
        self._bell, self._bell_out = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_out.setblocking(False)
        # Not epoll, which forked data workers would share.
        self._selector = selectors.PollSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        _watches.add(self)
        if self.rank == 0:
            self._thread.start()
        if alone:
            return
        port, token = self._processes.broadcast((self._listener.getsockname()[1] if self._listener else 0, self._token))
        try:
            with self._processes.together():
                if self.rank != 0:
                    self._connect(port, token)
        except BaseException:
            self.close()
            raise
        if self.rank != 0:
            self._thread.start()

    def failed(self, reason: str, told: int = 0) -> None:
        """Tell the others that this rank ends with an error of its own. Takes 2 s at most; `close` must follow within LEAVING.

        Args:
            reason: one line.
            told: this rank's exit code, when it has said why itself, so that no other rank needs to.
        """
        self._await_verdict()
        if self._thread is not None and self._state == RUNNING:
            self._reason = " ".join(reason.split())[:1000]
            self._settled.clear()
            self._told, self._state = told, FAILED
            self._ring()
            self._settled.wait(2.0)

    def explain(self, error: BaseException) -> str | None:
        """Another rank's end, in a sentence, when that is what raised `error` in a collective; None when the error is this rank's own.

        Takes up to GRACE seconds, and does not return when a verdict is being carried out. After a sentence, `close` must follow
        within LEAVING.
        """
        self._await_verdict()
        if self._thread is None or self.count == 1 or self._state != RUNNING or not _broke_a_collective(error):
            return None
        self._ring()
        self._news.wait(GRACE)
        self._await_verdict()
        sentence = self._cause()
        if sentence is not None:
            self._settled.clear()
            self._reason, self._state = sentence, ENDED
            self._ring()
            self._settled.wait(2.0)
        return sentence

    def close(self) -> None:
        """End the watch; a rank that has neither failed nor ended with another has then ended in order."""
        self._await_verdict()
        thread, self._thread = self._thread, None
        if thread is None:
            self._close_log()
            return
        if self._state == RUNNING:
            self._state = CLOSED
        self._stopping = True
        self._ring()
        if thread.ident is not None:
            thread.join(5.0)
        else:
            self._hang_up()
        _watches.discard(self)
        self._close_log()

    def _cause(self) -> str | None:
        if self._first is not None:
            return self._sentence(self._first) if self._first != self.rank else None
        if self._line is not None and self._now - self._heard[0] >= self._silence:
            return f"rank 0{self._elsewhere(self._table[0])} does not answer: last seen in {self._table[0].sight}"
        gone = [entry for entry in self._table.values() if entry.state == CLOSED]
        return f"rank {gone[0].rank} has ended, while this rank still needs it" if gone else None

    def _sentence(self, rank: int) -> str:
        entry = self._table[rank]
        if entry.state == FAILED and entry.told:
            return entry.reason
        if entry.state == FAILED:
            return f"rank {rank}{self._elsewhere(entry)} failed: {entry.reason}"
        if self._gone(entry):
            return f"rank {rank} was killed, crashed or ran out of memory (its process {entry.pid} is gone): last seen in {entry.place}"
        return f"rank {rank}{self._elsewhere(entry)} was killed or lost its connection: last seen in {entry.place}"

    def _elsewhere(self, entry: Entry) -> str:
        """ " on host NAME" for a rank of another host."""
        return f" on host {entry.host_name}" if entry.host != self._table[self.rank].host else ""

    def _await_verdict(self) -> None:
        """Block the caller while the watching thread ends this process."""
        if self._ending:
            time.sleep(BACKSTOP + 5)

    # The stacks' file.

    @property
    def _logs(self) -> Path:
        return self._output_dir / "logs"

    def _open_log(self) -> None:
        file = self._logs / f"rank_{self.rank}.log"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}: choose another --output_dir") from error
        if STACKS_SIGNAL is not None:
            # Inherited by data workers that are forked; one that is not dies of the signal, which is sent only before its end.
            faulthandler.register(STACKS_SIGNAL, file=self._log, all_threads=True)

    def _close_log(self) -> None:
        if self._log is None:
            return
        if STACKS_SIGNAL is not None:
            faulthandler.unregister(STACKS_SIGNAL)
        empty = os.fstat(self._log).st_size == 0
        os.close(self._log)
        self._log = None
        if empty:
            with suppress(OSError):
                (self._logs / f"rank_{self.rank}.log").unlink()
                self._logs.rmdir()

    # Connections.

    def _listen_on(self) -> None:
        self._token = secrets.token_hex(16)
        if self._processes.local_count == self.count:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=self.count)
        elif socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self.count)
        else:
            self._listener = socket.create_server(("", 0), backlog=self.count)

    def _connect(self, port: int, token: str) -> None:
        """Reach the hub and be answered, so that no rank works unwatched."""
        host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        if self._processes.local_count == self.count:
            host = "127.0.0.1"
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT)
        except OSError as error:
            raise UserError(
                f"rank {self.rank} cannot reach rank 0, which watches over the ranks, at {host}:{port} ({error}): open the ports "
                "between the hosts, as the training itself needs them"
            ) from error
        self._line = Line(connection)
        self._line.send({"token": token, "entry": vars(self._table[self.rank])})
        deadline = time.monotonic() + CONNECT
        while 0 not in self._table:
            if time.monotonic() > deadline or not self._take_answers(self._line):
                raise UserError(f"rank 0, which watches over the ranks, does not answer rank {self.rank} at {host}:{port}")
        self._selector.register(connection, selectors.EVENT_READ, self._line)

    @property
    def _peers(self) -> list[Line]:
        """The hub's connections to ranks, without those that have not shown the token."""
        return [line for line in self._lines if line.rank is not None]

    def _ring(self) -> None:
        """Wake the watching thread."""
        with suppress(OSError):
            self._bell_out.send(b"\0")

    def _receive(self, seconds: float) -> None:
        """Take in what comes within `seconds`, or sooner: what came first."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._bell:
                with suppress(OSError):
                    self._bell.recv(4096)
                self._rung = True
            elif key.fileobj is self._listener:
                with suppress(OSError):
                    connection = self._listener.accept()[0]
                    self._lines.append(Line(connection))
                    self._selector.register(connection, selectors.EVENT_READ, self._lines[-1])
            elif self._line is not None:
                self._take_answers(self._line)
            else:
                self._take_entries(key.data)

    def _drop(self, line: Line) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()
        if line in self._lines:
            self._lines.remove(line)

    def _take_answers(self, line: Line) -> bool:
        """Another rank: what the hub says. False when it is gone."""
        messages = line.receive()
        for message in messages or ():
            self._asked = False
            self._heard[0] = self._now
            for entry in message["table"]:
                if entry["rank"] != self.rank:
                    self._table[entry["rank"]] = Entry(**entry)
            if message["first"] is not None:
                self._note(message["first"])
            if self._published == self._state:
                self._settled.set()
            if message["verdict"]:
                self._end(message["verdict"], frozenset(message["silent"]))
        if messages is None:
            self._line = None
            self._drop(line)
            if 0 in self._table and self._table[0].state == RUNNING:
                self._table[0].state = LOST
                self._note(0)
            self._settled.set()
        return messages is not None

    def _take_entries(self, line: Line) -> None:
        """The hub: what another rank says."""
        messages = line.receive()
        for message in messages or ():
            if line.rank is None and message.get("token") != self._token:
                messages = None
                break
            entry = Entry(**message["entry"])
            line.rank, old = entry.rank, self._table.get(entry.rank)
            self._table[entry.rank] = entry
            self._heard[entry.rank] = self._now
            if old is None or old.counter != entry.counter:
                self._moved[entry.rank] = self._now
            if old is not None and old.state != entry.state:
                self._tell_news(entry.rank)
            else:
                line.send(self._answer())
        if messages is None:
            self._drop(line)
            if line.rank is not None and self._table[line.rank].state == RUNNING:
                self._table[line.rank].state = LOST
                self._tell_news(line.rank)

    def _answer(self, verdict: list[str] | None = None) -> dict[str, Any]:
        table = [vars(entry) for entry in self._table.values()]
        return {"table": table, "first": self._first, "verdict": verdict, "silent": sorted(self._silent)}

    def _tell_news(self, rank: int) -> None:
        if self._table[rank].state in (FAILED, LOST):
            self._note(rank)
        for line in self._peers:
            line.send(self._answer())

    def _note(self, rank: int) -> None:
        """Keep who failed first: what follows on other ranks follows from it."""
        if self._first is not None:
            return
        self._first, self._first_at = rank, self._now
        self._bury(self._table[rank])
        self._news.set()

    def _gone(self, entry: Entry) -> bool:
        """Whether a process of this host that lost its connection is no more; it takes a moment to leave."""
        for _ in range(30):
            if entry.host != self._table[self.rank].host:
                return False
            process = find_process(entry.pid, entry.born)
            if process is None:
                return True
            time.sleep(0.01)
        return False

    def _bury(self, entry: Entry) -> None:
        """Kill the data workers that a killed rank of this host left behind: they hold its connections of the process group open."""
        if entry.state == LOST and self._gone(entry):
            _kill(filter(None, (find_process(pid, born) for pid, born in entry.children)))

    # The watching thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._tick()
                due = time.monotonic() + self._beat
                while not self._rung and (left := due - time.monotonic()) > 0:
                    self._receive(left)
                self._rung = False
        except Exception as error:
            self._state = CLOSED if self._state == RUNNING else self._state
            print(f"warning: rank {self.rank} is not watched any more ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
        finally:
            # The others must not take this end for a death.
            with suppress(Exception):
                self._hang_up()
            self._settled.set()

    def _tick(self) -> None:
        moment = time.monotonic()
        self._now += min(moment - self._moment, max(1.0, 2 * self._beat))
        self._moment = moment
        self._publish()
        self._judge()

    def _publish(self) -> None:
        me = self._table[self.rank]
        if me.counter != self.counter:
            self._moved[self.rank] = self._now
            me.frame, me.waits = "", False
        else:
            me.frame, me.waits = _whereabouts(sys._current_frames().get(self._watched))
        me.counter, me.phase, me.epoch, me.step = self.counter, self.phase, self.epoch, self.step
        me.children = _children(me)
        if me.state != self._state:
            me.state, me.reason, me.told, self._turned = self._state, self._reason, self._told, self._now
            if self._line is None:
                self._tell_news(self.rank)
                self._settled.set()
        if self._line is not None and (not self._asked or self._published != me.state):
            self._asked, self._published = True, me.state
            self._line.send({"entry": vars(me)})

    def _judge(self) -> None:
        moved = self._moved[self.rank]
        if self._state == CLOSED:
            return
        if self._state in (FAILED, ENDED):
            if self._now - self._turned >= LEAVING:
                self._end([f"error: rank {self.rank} did not end within {LEAVING:.0f} s of its error: {self._reason}"], frozenset())
        elif self._first is not None and self._first != self.rank:
            if self._now - max(moved, self._first_at) >= GRACE:
                self._end([f"error: {self._sentence(self._first)}", *rows(self._table, [])], self._late())
        elif not self._timeout:
            pass
        elif self._line is None:
            running = [rank for rank, entry in self._table.items() if entry.state == RUNNING and rank in self._moved]
            if self._now - max(self._moved[rank] for rank in running) >= self._timeout:
                self._end_hang(self._late())
        elif self._now - moved >= self._timeout and self._now - self._heard[0] >= self._silence:
            self._end_hang(frozenset({0}))

    def _late(self) -> frozenset[int]:
        """The hub: the ranks that should be at work, and say nothing."""
        heard = self._heard.items() if self.rank == 0 else ()
        return frozenset(rank for rank, at in heard if self._table[rank].state == RUNNING and self._now - at >= self._silence)

    def _end_hang(self, silent: frozenset[int]) -> None:
        running = {rank: entry for rank, entry in self._table.items() if entry.state == RUNNING}
        absent = missing(running, silent)
        places = {self._elsewhere(self._table[rank]) for rank in absent}
        # One host that all of them are on, and this rank is not.
        where = places.pop() if len(places) == 1 else ""
        what = f"{_names(absent)}{where} did not arrive" if absent else "no rank is known to wait for another"
        lines = [f"error: no progress for {self._timeout:g} s (--hang_timeout): {what}", *rows(self._table, absent)]
        for rank in sorted(silent):
            entry = self._table[rank]
            if self._elsewhere(entry):
                lines.append(
                    f"rank {rank}: nothing is heard from its process {entry.pid} on host {entry.host_name}: the process is stopped, "
                    "or the host or the network to it is down"
                )
                continue
            process = find_process(entry.pid, entry.born)
            stopped = process is not None and process.status() == psutil.STATUS_STOPPED
            lines.append(f"rank {rank}: its process {entry.pid} {'is stopped' if stopped else 'does not answer'}")
        if 0 in silent and self.count > 2:
            lines.append(f"where ranks other than {self.rank} are is as rank 0 last passed it on")
        lines.append(f"stacks of all ranks: {self._logs}/rank_*.log; if this is no hang but slow work, raise --hang_timeout")
        self._end(lines, silent)

    def _end(self, lines: list[str], silent: frozenset[int]) -> None:
        """Say it, have it written down, and end this process, its children, and the silent ranks of this host."""
        self._ending = True
        threading.Thread(target=self._backstop, daemon=True).start()
        reason = lines[0].removeprefix("error: ")
        try:
            self._silent = silent
            if self.speaks and not self.told:
                self._say("\n".join(lines))
            for line in self._peers:
                line.send(self._answer(lines))
            if self.on_verdict is not None:
                with suppress(Exception):
                    self.on_verdict(reason)
            self._dump(reason)
            for entry in self._table.values():
                self._bury(entry)
            peers = {rank: entry for rank, entry in self._table.items() if entry.host == self._table[self.rank].host}
            able = [rank for rank, entry in peers.items() if rank not in silent and entry.state in (RUNNING, DUMPED, ENDED)]
            unable = silent | self._await_dumps()
            if self.rank == min(able, default=self.rank):
                for rank in sorted(unable & peers.keys()):
                    self._end_peer(peers[rank])
            elif self._line is not None:
                # A launcher kills the others once one has ended: those that still help a silent rank come first.
                self._table[self.rank].state = DUMPED
                self._line.send({"entry": vars(self._table[self.rank])})
                self._await_hub(self._line)
        finally:
            os._exit(self.told or 1)

    def _backstop(self) -> None:
        time.sleep(BACKSTOP)
        with suppress(Exception):
            _kill(psutil.Process().children(recursive=True))
        os._exit(1)

    def _say(self, text: str) -> None:
        with suppress(Exception):
            # A progress bar may stand on the line.
            print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
        with suppress(OSError), (self._output_dir / "train.log").open("r+", encoding="utf-8") as log:
            log.seek(0, os.SEEK_END)
            log.write(text + "\n")

    def _dump(self, reason: str) -> None:
        """Write this process's stacks and its children's, and kill the children."""
        children = psutil.Process().children(recursive=True)
        if self._log is not None:
            with suppress(OSError):
                me = self._table[self.rank]
                self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\nrank {self.rank}, process {me.pid}, in {me.sight}\n")
                faulthandler.dump_traceback(self._log, all_threads=True)
            workers = {pid for pid, _ in self._table[self.rank].children}
            self._dump_workers([child for child in children if child.pid in workers], self._logs / f"rank_{self.rank}.log")
        _kill(children)
        # Where the first process of a container adopts none, the dead would stay listed.
        psutil.wait_procs(children, timeout=1.0)

    def _dump_workers(self, workers: list[psutil.Process], file: Path) -> None:
        deadline = time.monotonic() + 2.0
        for worker in workers:
            with suppress(OSError), file.open("ab", buffering=0) as log:
                log.write(f"\ndata worker, process {worker.pid}\n".encode())
            _have_stacks_written(worker, file, min(deadline, time.monotonic() + 0.5))

    def _write(self, text: str) -> None:
        if self._log is not None:
            os.write(self._log, text.encode())

    def _end_peer(self, entry: Entry) -> None:
        """Make a process of this host that does not answer write its stacks, and kill it and its children."""
        process = find_process(entry.pid, entry.born)
        if process is None:
            return
        with suppress(psutil.Error):
            children = process.children(recursive=True)
            file = self._logs / f"rank_{entry.rank}.log"
            with suppress(OSError), file.open("ab", buffering=0) as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {entry.rank}, process {entry.pid}, does not answer\n".encode())
            _have_stacks_written(process, file, time.monotonic() + 1.0)
            workers = {pid for pid, _ in entry.children}
            self._dump_workers([child for child in children if child.pid in workers], file)
            _kill([process, *children])

    def _await_dumps(self) -> frozenset[int]:
        """The hub: wait until the others have written their stacks, 2 s; those that have not."""
        deadline = time.monotonic() + 2.0
        while True:
            busy = {line.rank for line in self._peers if line.rank is not None and line.rank not in self._silent}
            busy = {rank for rank in busy if self._table[rank].state == RUNNING}
            if not busy or time.monotonic() > deadline:
                return frozenset(busy)
            self._receive(0.1)

    def _await_hub(self, line: Line) -> None:
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline and line.receive() is not None:
            pass

    def _hang_up(self) -> None:
        """Say what state this rank ends in, and close: after the other end, so that nothing sent is lost."""
        self._publish_end()
        deadline = time.monotonic() + 2.0
        lines = [self._line] if self._line is not None else list(self._lines)
        for line in lines:
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        for line in lines:
            while time.monotonic() < deadline and line.receive() is not None:
                pass
        self._close_sockets()

    def _publish_end(self) -> None:
        me = self._table[self.rank]
        me.state, me.reason = self._state, self._reason
        if self._line is not None:
            self._line.send({"entry": vars(me)})
        for line in self._peers:
            line.send(self._answer())

    def _close_sockets(self) -> None:
        """Also in a forked child: a copy there would keep the connection of a dead rank open."""
        connections = [line.socket for line in (*self._lines, *([self._line] if self._line else []))]
        for connection in (self._bell, self._bell_out, *connections, *([self._listener] if self._listener else [])):
            connection.close()
        self._lines, self._line, self._listener = [], None, None


def missing(running: Mapping[int, Entry], silent: Iterable[int]) -> list[int]:
    """The ranks that the others wait for, by the strongest sign: silent; behind in the program; not in a collective where the others are.

    Empty when nothing tells them apart.
    """
    if silent or not running:
        return sorted(silent)
    lowest = min(entry.counter for entry in running.values())
    behind = [rank for rank in sorted(running) if running[rank].counter == lowest]
    busy = [rank for rank in behind if not running[rank].waits]
    if len(running) == 1 or len(behind) < len(running):
        return busy or behind
    return busy if len(busy) < len(running) else []


def rows(table: Mapping[int, Entry], absent: Iterable[int]) -> list[str]:
    """A line for each rank; the waiting ones share lines when there are many."""
    absent = set(absent)
    waiting: dict[str, list[int]] = {}
    others: list[tuple[int, str]] = []
    for rank, entry in sorted(table.items()):
        if rank in absent:
            others.append((rank, f"rank {rank} is missing: last seen in {entry.sight}"))
        elif entry.state == CLOSED:
            others.append((rank, f"rank {rank} has ended in order"))
        elif entry.state in (FAILED, LOST):
            others.append((rank, f"rank {rank} {entry.state if entry.state == FAILED else 'was lost'} in {entry.place}"))
        elif absent or entry.waits:
            waiting.setdefault(entry.place if len(table) > EACH_RANK_A_LINE else f"{rank}", []).append(rank)
        else:
            others.append((rank, f"rank {rank} is in {entry.sight}"))
    for ranks in waiting.values():
        others.append((ranks[0], f"{_names(ranks)} wait{'s' if len(ranks) == 1 else ''} in {table[ranks[0]].place}"))
    return [text for _, text in sorted(others)]


def _names(ranks: list[int]) -> str:
    """ "rank 1", "ranks 0, 2-7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def _broke_a_collective(error: BaseException) -> bool:
    """Whether it, or one that it came from, is torch's word for a collective that another rank left."""
    link: BaseException | None = error
    for _ in range(10):
        if link is None:
            return False
        if isinstance(link, RuntimeError) and (type(link).__name__.startswith("Dist") or BROKEN_COLLECTIVE.search(str(link))):
            return True
        link = link.__cause__ or link.__context__
    return False


def _whereabouts(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost frame outside of libraries, the innermost of all if that is another, and whether this is one that waits for ranks."""
    if frame is None:
        return "", False
    waits = WAITING.search(f"{frame.f_code.co_filename}:{frame.f_code.co_name}") is not None
    inner, own = frame, None
    while frame is not None and own is None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}{os.sep}") or not ("site-packages" in file or file.startswith((LIBRARY, "<"))):
            own = frame
        frame = frame.f_back
    if own is None or own is inner:
        return _frame_name(inner), waits
    return f"{_frame_name(own)} (in {_frame_name(inner)})", waits


def _frame_name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    parts = path.parts
    if path.is_relative_to(ROOT):
        parts = path.relative_to(ROOT.parent).parts
    elif "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    else:
        parts = parts[-2:]
    return f"{'/'.join(parts)}:{frame.f_lineno} {frame.f_code.co_name}"


def _host() -> str:
    """Equal for processes that see each other by pid: not so in two containers of one host."""
    words = [socket.gethostname()]
    with suppress(OSError):
        words += [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(words)


def _children(entry: Entry) -> list[tuple[int, float]]:
    """The processes that this one's main thread started, as a data loader does, and theirs; none where the kernel does not list them."""
    known, found, parents = dict(entry.children), [], [entry.pid]
    while parents:
        parent = parents.pop()
        try:
            with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            continue
        parents += pids
        for pid in pids:
            with suppress(psutil.Error):
                found.append((pid, known[pid] if pid in known else psutil.Process(pid).create_time()))
    return found


def _have_stacks_written(process: psutil.Process, file: Path, deadline: float) -> None:
    """Make a process write its stacks into its file, and wait until it has, or `deadline`. A stopped one is continued."""
    if STACKS_SIGNAL is None:
        return
    with suppress(OSError, psutil.Error):
        size = file.stat().st_size
        # In this order: the handler runs where the process was stopped, before it moves.
        process.send_signal(STACKS_SIGNAL)
        process.send_signal(signal.SIGCONT)
        while file.stat().st_size == size and time.monotonic() < deadline and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
        while file.stat().st_size != size and time.monotonic() < deadline:
            size = file.stat().st_size
            time.sleep(0.02)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for watch in list(_watches):
        watch._close_sockets()
        watch._thread, watch._log = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
