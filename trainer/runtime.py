"""The processes of a run: joining them, agreeing between them, and ending together.

Nothing between processes may depend on a fact that only one of them knows (an exception, a file, a clock). `Processes.together` is
how a step that can fail is taken: every rank attempts it, every rank learns the outcome, and all go on or all end.
"""

import errno
import gc
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trainer.cpu import prepare_process, return_freed_memory
from trainer.stops import Interrupted, Stops, leave_marker, restarted, stopped_before

if TYPE_CHECKING:
    from accelerate import PartialState

EXIT_DONE, EXIT_FAILURE, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 75
# Waiting for a rank that downloads a data set can rightly take hours; a rank that died is ended by its launcher, not by this limit.
CONTROL_TIMEOUT = timedelta(hours=24)
# Seconds after which a process that is still alone says what it waits for.
PATIENCE = 30.0
REFUSED_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}

# The store of this process's group, by `group_place`; see `keep_store`.
JOINED: dict[tuple[str, ...], tuple[Any, int]] = {}
# The process that trained in this Python, or in the one that it was forked from; empty before.
TRAINED_IN: list[int] = []

C = TypeVar("C")
T = TypeVar("T")


class UserError(Exception):
    """A user's mistake: its text is one plain sentence that names the thing and the way to mend it.

    Attributes:
        agreed: all ranks raise the same error, so that the main process alone prints it.
    """

    code = EXIT_USER

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class RunError(UserError):
    """What went wrong in the middle of a run and is no bug of the trainer: a full disk, a loss that is not finite. One sentence too."""

    code = EXIT_FAILURE


class Stopped(Exception):
    """All ranks stopped on request, and the run can be resumed; its text says why and how."""


class PeerError(Exception):
    """Another rank failed and tells its own story; this one only ends with it."""


def env_int(name: str, default: int) -> int:
    """An integer from the environment, or `default` where it is not set.

    Raises:
        UserError: it is set, but is not an integer.
    """
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UserError(f"the environment variable {name} must be a whole number, but is {text!r}: correct or unset it") from None


def env_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


@dataclass
class Processes:
    """The processes of this run, joined.

    Attributes:
        state: Accelerate's view: rank, number of processes, device, backend.
        control: a gloo group for small messages between the processes' CPUs; None where there is no process group.
        stops: what the ranks want to stop for.
        at_exit: called as `at_exit(code, reason)` on every rank when the command ends, whatever ends it.
        at_failure: called with the exception that ends this rank; tells the others of it, or returns the exit code and the sentence of
            the rank that is to blame for it, and whether this rank is the one to print it.
        in_haste: the end waits for nothing: neither data workers nor a checkpoint that is being written.
        at_last: called when the process group has been left.
        started: when this process joined, `time.monotonic` seconds.
    """

    state: "PartialState"
    control: Any = None
    stops: Stops = field(default_factory=Stops)
    at_exit: list[Callable[[int, str], None]] = field(default_factory=list)
    at_failure: list[Callable[[BaseException], tuple[int, str, bool] | None]] = field(default_factory=list)
    at_last: list[Callable[[], None]] = field(default_factory=list)
    in_haste: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> int:
        return int(self.state.process_index)

    @property
    def count(self) -> int:
        return int(self.state.num_processes)

    @property
    def local_count(self) -> int:
        return env_int("LOCAL_WORLD_SIZE", self.count)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """The `value` of each rank, in rank order, on every rank. A collective."""
        if self.control is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, in rank order, on rank 0; nothing on the others. A collective."""
        if self.control is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.count if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values or []

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank. A collective."""
        if self.control is None:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that holds no collective on every rank; when it fails on any rank, every rank raises. A collective.

        Raises:
            UserError: the first rank's user error, the same on all ranks.
            Interrupted: a rank was asked to stop, and the training has not begun.
            PeerError: another rank failed otherwise; that rank re-raises its own exception.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = disk_full(error) or error
        sentence = (type(failure), str(failure)) if isinstance(failure, UserError) else None
        outcomes = self.all_gather((failure is not None, sentence, self.stops.first_request()))
        for rank, (failed, message, _) in enumerate(outcomes):
            if message is not None:
                kind, text = message
                raise (RunError if issubclass(kind, RunError) else UserError)(text, agreed=True)
            if failed:
                raise failure if failure is not None else PeerError(f"rank {rank} failed")
        request = next((request for _, _, request in outcomes if request is not None), None)
        if request is not None and not self.stops.training:
            raise Interrupted(request)

    def local_main_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on every rank, local rank 0 of each host first, so that the others find its caches. A collective.

        Raises:
            UserError, PeerError: as `together`; the waiting ranks end with the one that failed.
        """
        results: list[T] = []
        for turn in (True, False):
            with self.together():
                if (self.state.local_process_index == 0) is turn:
                    results.append(work())
        return results[0]


def disk_full(error: BaseException) -> RunError | None:
    """The sentence for an operating system's error that means no space left; None for any other."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" of {error.filename}" if error.filename else ""
        return RunError(
            f"no space left on the disk{place} ({error.strerror}): free some; what was written whole is intact, and --resume auto goes on"
        )
    return None


def run_command(parse: Callable[[], C], body: Callable[[C, Processes], object]) -> None:
    """Run a command on every process: parse, join the process group, `body`, leave the group, whatever happens.

    A user's mistake is one sentence on stderr, from the main process, also when all ranks find it: they join first, and none
    leaves before the sentence is written, since a launcher ends the whole group as soon as one process leaves.

    Raises:
        SystemExit: the command did not end as asked; 2 for a user's mistake, 75 for a stop on request, 1 for anything else.
    """
    stops = Stops()
    code, _ = _run(parse, body, stops, say)
    if code != EXIT_DONE:
        raise SystemExit(code)


def run_call(body: Callable[[Processes], T]) -> T:
    """As `run_command`, for a program that goes on afterwards: what `body` returns, and what it raises, on every process.

    A first Ctrl-C stops the training in order, a second one raises KeyboardInterrupt.

    Raises:
        UserError: a user's mistake.
        RunError: what went wrong in the middle.
        Stopped: the training was stopped on request, and can be resumed.
        KeyboardInterrupt: it was interrupted before it began, or a second time.
    """
    results: list[T] = []
    stops = Stops(in_program=True)
    _, raised = _run(lambda: None, lambda _, processes: results.append(body(processes)), stops, lambda text: None)
    if isinstance(raised, (UserError, Stopped)):
        # A sentence, for which where it was found is no matter.
        raise raised.with_traceback(None) from None
    if raised is not None:
        raise raised
    return results[0]


def _run(
    parse: Callable[[], C], body: Callable[[C, Processes], object], stops: Stops, tell: Callable[[str], None]
) -> tuple[int, BaseException | None]:
    """The exit code, and what ended this process's part of it, which `tell` was told of where this is the rank to do so."""
    processes: Processes | None = None
    raised: BaseException | None = None
    code, reason = EXIT_FAILURE, "ended unexpectedly"
    prepare_process()
    stops.install()
    before = stopped_before()
    try:
        if before is not None:
            raise Stopped(f"the launcher started the training again, but it had been stopped on request ({before}): nothing is done")
        config, mistake = None, None
        try:
            config = parse()
            refuse_engines()
            refuse_fork()
        except UserError as error:
            mistake = error
        # This one is answered by each process for itself: what it refuses is a group that cannot be joined.
        world_size = launched_world_size()
        if mistake is not None and world_size == 1:
            raise mistake
        processes = join(stops)
        TRAINED_IN[:] = [os.getpid()]
        if not stops.in_program:
            stops.at_once = lambda: end_at_once(processes)
        stops.joined = processes.count > 1
        with processes.together():
            if mistake is not None:
                raise mistake
        try:
            body(cast(C, config), processes)
        finally:
            # On the way out a signal has nothing left to interrupt.
            stops.training = True
        code, reason = EXIT_DONE, "done"
    except (Stopped, Interrupted) as stop:
        code, reason, raised = EXIT_STOPPED, str(stop) if isinstance(stop, Stopped) else f"{stop} before the training began", stop
        if _rank(processes) == 0:
            tell(f"stopped: {reason}")
        # An elastic launcher sends SIGTERM to the others when a worker has died: then it is right to start again.
        if before is None and not (isinstance(stop, Interrupted) and str(stop) == "SIGTERM"):
            leave_marker(reason)
    except KeyboardInterrupt as stop:
        code, reason, raised = EXIT_FAILURE, "interrupted", stop
        if _rank(processes) == 0:
            tell(reason)
    except Exception as error:
        code, reason, raised = explain_end(error, processes, tell)
    finally:
        if processes is not None:
            end(processes, code, reason)
        stops.remove()
    return code, raised


def explain_end(raised: Exception, processes: Processes | None, tell: Callable[[str], None]) -> tuple[int, str, Exception]:
    """Tell why this rank ends, unless another one does; the exit code, the reason, and the exception that says it best."""
    error = disk_full(raised) or raised
    if isinstance(error, UserError):
        rank = _rank(processes)
        if rank == 0 or not error.agreed:
            tell(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}")
        if processes is not None and error.agreed:
            # Another rank may be gone already, killed by the launcher.
            with suppress(Exception):
                processes.all_gather(None)
        elif processes is not None:
            blame(error, processes)
        return error.code, str(error), error
    if isinstance(error, PeerError):
        return EXIT_FAILURE, str(error), error
    other = blame(error, processes) if processes is not None else None
    if other is not None:
        code, sentence, speaks = other
        if speaks:
            tell(f"error: {sentence}")
        return code, sentence, RunError(sentence)
    with suppress(OSError):
        tell(traceback.format_exc().rstrip())
    return EXIT_FAILURE, f"{type(error).__name__}: {error}", error


def blame(error: BaseException, processes: Processes) -> tuple[int, str, bool] | None:
    """Tell the other ranks of `error`, or hear from them whose fault it is."""
    return next((other for ask in processes.at_failure if (other := ask(error)) is not None), None)


def say(text: str) -> None:
    """A line on stderr, whose reader may have gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def end_at_once(processes: Processes | None) -> None:
    """End this process now, in whatever it is: for a user who will not wait. What was written whole stays."""
    import psutil

    say("stopped at once")
    if processes is not None:
        processes.in_haste = True
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    for leave in processes.at_exit if processes is not None else ():
        with suppress(Exception):
            leave(EXIT_FAILURE, "stopped at once, without a checkpoint")
    if processes is not None:
        blame(KeyboardInterrupt("stopped at once"), processes)
    os._exit(EXIT_FAILURE)


def _rank(processes: Processes | None) -> int:
    """This process's rank; the launcher's RANK where the group could not be joined, 0 where that is missing or no number."""
    if processes is not None:
        return processes.rank
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def refuse_engines() -> None:
    """Refuse what a launcher's config file can ask for and this trainer does not do.

    Raises:
        UserError: naming the engine.
    """
    for variable, engine in REFUSED_ENGINES.items():
        if env_true(variable):
            # So that joining the group, which is needed to say this once, does not start the engine.
            os.environ[variable] = "false"
            raise UserError(
                f"{engine} is not supported: this trainer replicates the model (DistributedDataParallel); "
                "answer 'no' to it in `accelerate config`, or launch with a file of accelerate_configs/"
            )


def refuse_fork() -> None:
    """Refuse to train in a fork of a process that has trained: OpenMP's threads are not in the fork, where it waits for them for ever.

    Raises:
        UserError: it is one.
    """
    if TRAINED_IN and [os.getpid()] != TRAINED_IN:
        raise UserError(
            "this process was forked from one that had trained already, and would hang: restart the notebook's kernel, and call "
            "notebook_launcher before anything else trains there"
        )


def launched_world_size() -> int:
    """The number of processes that the launcher says it started (WORLD_SIZE), 1 without a launcher.

    Raises:
        UserError: the launcher's variables contradict each other or are incomplete; waiting for the missing rank would hang.
    """
    adopt_debug_group()
    size = env_int("WORLD_SIZE", 1)
    if size < 1:
        raise UserError(f"WORLD_SIZE is {size}, but must be at least 1: correct or unset it")
    # Accelerate reads these too, and torch the port.
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env_int(name, 0)
    if size > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {size}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
                "start all processes with `accelerate launch` or `torchrun`, or unset WORLD_SIZE for one process"
            )
        port = env_int("MASTER_PORT", 0)
        if not 0 < port < 1 << 16:
            raise UserError(f"MASTER_PORT is {port}: choose a free port between 1 and 65535")
    rank = env_int("RANK", 0)
    if not 0 <= rank < size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}")
    return size


def adopt_debug_group() -> None:
    """Set the variables that Accelerate's `debug_launcher` leaves out: it joins the processes itself, all on this host, without RANK."""
    if "ACCELERATE_DEBUG_RDV_FILE" not in os.environ:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=str(dist.get_world_size()))


def join(stops: Stops | None = None) -> Processes:
    """Join the process group that the launcher's environment describes: nccl on CUDA, gloo on a machine without GPU.

    Args:
        stops: this process's, whose signals are already taken over.

    Raises:
        UserError: an unsupported device, a port in use, an unreachable network interface, or a number of processes that is not
            the launcher's.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    if env_int("RANK", 0) != 0:
        warnings.simplefilter("ignore")
    device = torch.accelerator.current_accelerator(check_available=True)
    refuse_device(device.type if device else "cpu")
    # PartialState lowers the number of threads, with a warning, when this is unset; accelerator.py sets the threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    impatient = threading.Timer(PATIENCE, _say_who_is_awaited)
    impatient.daemon = True
    impatient.start()
    try:
        # Without cpu=True, Accelerate makes every process of a machine without GPU believe that it is the only one.
        state = PartialState(cpu=device is None or env_true("ACCELERATE_USE_CPU"), **group_arguments())
    except (RuntimeError, ValueError) as error:
        # Half-made state would answer the next attempt in this Python, for example in a notebook.
        PartialState._reset_state()
        raise _network_error(error) from error
    finally:
        impatient.cancel()
    size = env_int("WORLD_SIZE", 1)
    if state.num_processes != size:
        raise UserError(
            f"the launcher started {size} processes, but Accelerate counts {state.num_processes}: start them with "
            "`accelerate launch` or `torchrun`"
        )
    processes = Processes(state, stops=stops or Stops())
    if dist.is_initialized():
        keep_store()
        processes.control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        processes.stops.join(dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
    return processes


def group_arguments() -> dict[str, Any]:
    """What `init_process_group` needs beyond the environment, which is nothing for the first training of a process."""
    place = group_place()
    if place not in JOINED:
        return restarted_group()
    import torch.distributed as dist

    # The addresses of the group before are still in the store, and gloo would connect to what is gone, and wait.
    store, times = JOINED[place]
    prefixed = dist.PrefixStore(f"training_{times}", store)  # type: ignore[attr-defined]
    return {"store": prefixed, "rank": env_int("RANK", 0), "world_size": env_int("WORLD_SIZE", 1)}


def keep_store() -> None:
    """Keep the store over which the group was joined for the next group of the same processes, with the number of groups joined so far.

    It is the same one for all of them: that of a group that is gone may still answer one rank while another one opens a new one.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    place = group_place()
    store, times = JOINED.pop(place, (None, 0))
    JOINED.clear()
    JOINED[place] = (store or _get_default_store(), times + 1)


def group_place() -> tuple[str, ...]:
    """Where the processes meet, and as which of them this one does."""
    return tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))


def restarted_group() -> dict[str, Any]:
    """What `init_process_group` needs when an elastic launcher has started this group again, else nothing.

    With the static rendezvous, which `accelerate launch` uses, the launcher's store still holds the addresses of the attempt before,
    and gloo connects to processes that are gone (torch 2.14). Each attempt therefore gets keys of its own.
    """
    if not restarted() or not env_true("TORCHELASTIC_USE_AGENT_STORE"):
        return {}
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], env_int("MASTER_PORT", 0), is_master=False)  # type: ignore[attr-defined]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    prefixed = dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]
    return {"store": prefixed, "rank": env_int("RANK", 0), "world_size": env_int("WORLD_SIZE", 1)}


def refuse_device(device_type: str) -> None:
    """Refuse an accelerator that the trainer is not tested on.

    Raises:
        UserError: naming the device and how to train on the CPU instead.
    """
    if device_type not in ("cuda", "cpu") and not env_true("ACCELERATE_USE_CPU"):
        raise UserError(
            f"the device '{device_type}' (for example Apple's MPS, or a TPU) is not supported: train on the CPU with "
            "`accelerate launch --cpu`, or with ACCELERATE_USE_CPU=true"
        )


def _master() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '29500')}"


def _say_who_is_awaited() -> None:
    """A host that was not started, or started with another's rank, is waited for for half an hour."""
    if env_int("WORLD_SIZE", 1) > 1 and env_int("LOCAL_RANK", 0) == 0:
        say(
            f"rank {_rank(None)} on host {socket.gethostname()} waits at {_master()} for the other processes, {os.environ['WORLD_SIZE']} "
            f"in all, for {PATIENCE:.0f} s now: start every host, each with its own --machine_rank (--node_rank), the same address and port"
        )


def _network_error(error: Exception) -> Exception:
    text, place = str(error), _master()
    if "EADDRINUSE" in text or "in use" in text:
        return UserError(
            f"the port of {place} is in use by another program: choose another with --main_process_port (accelerate launch), "
            "--master_port (torchrun) or the environment variable MASTER_PORT"
        )
    if "MASTER_ADDR" in text:
        return UserError("MASTER_ADDR is not set: set it to the first host's address, and MASTER_PORT to a free port there")
    if "connectFullMesh" in text:
        return UserError(
            f"the processes found each other at {place}, but cannot connect directly: set GLOO_SOCKET_IFNAME (and "
            "NCCL_SOCKET_IFNAME on GPUs) to the network interface that reaches the other hosts, as `ip addr` names it"
        )
    if re.search("timed out|timeout", text, re.IGNORECASE):
        return UserError(
            f"not all {os.environ.get('WORLD_SIZE', '1')} processes came to {place} in time: start every host, each with its own "
            "--machine_rank (--node_rank), the same address and port, which no firewall may close"
        )
    return error


def end(processes: Processes, code: int = EXIT_DONE, reason: str = "done") -> None:
    """Tell all that `code` and `reason` end this process's part, leave the group and close what outlives it."""
    try:
        for leave in processes.at_exit:
            with suppress(OSError):
                leave(code, reason)
    finally:
        processes.at_exit.clear()
        leave_group(processes)
        for close in processes.at_last:
            close()
        processes.at_last.clear()
        return_freed_memory()


def leave_group(processes: Processes) -> None:
    """Destroy the process group and forget Accelerate's state, so that another run can start in this Python.

    gloo's threads live as long as anything refers to the group (this object, DDP, a cycle around them), and one that still holds a
    tensor when the interpreter ends aborts it: "terminate called without an active exception". So everything is let go here.
    """
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    from trainer import shared_gather

    processes.control = None
    processes.stops.leave()
    shared_gather.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
