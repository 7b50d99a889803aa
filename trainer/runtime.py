"""The processes of a run: joining them, agreeing between them, and ending together.

Nothing between processes may depend on a fact that only one of them knows (an exception, a file, a clock). `Processes.together` is
how a step that can fail is taken: every rank attempts it, every rank learns the outcome, and all go on or all end.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from accelerate import PartialState

EXIT_DONE, EXIT_FAILURE, EXIT_USER = 0, 1, 2
# Waiting for a rank that downloads a data set can rightly take hours; a rank that died is ended by its launcher, not by this limit.
CONTROL_TIMEOUT = timedelta(hours=24)
REFUSED_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}

C = TypeVar("C")
T = TypeVar("T")


class UserError(Exception):
    """A user's mistake: its text is one plain sentence that names the thing and the way to mend it.

    Attributes:
        agreed: all ranks raise the same error, so that the main process alone prints it.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


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
        at_exit: called as `at_exit(code, reason)` on every rank when the command ends, whatever ends it.
    """

    state: "PartialState"
    control: Any = None
    at_exit: list[Callable[[int, str], None]] = field(default_factory=list)

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

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank. A collective."""
        return self.all_gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that holds no collective on every rank; when it fails on any rank, every rank raises. A collective.

        Raises:
            UserError: the first rank's user error, the same on all ranks.
            PeerError: another rank failed otherwise; that rank re-raises its own exception.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        sentence = str(failure) if isinstance(failure, UserError) else None
        for rank, (failed, message) in enumerate(self.all_gather((failure is not None, sentence))):
            if message is not None:
                raise UserError(message, agreed=True)
            if failed:
                raise failure if failure is not None else PeerError(f"rank {rank} failed")

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


def run_command(parse: Callable[[], C], body: Callable[[C, Processes], None]) -> None:
    """Run a command on every process: parse, join the process group, `body`, leave the group, whatever happens.

    A user's mistake is one sentence on stderr, from the main process, also when all ranks find it: they join first, and none
    leaves before the sentence is written, since a launcher ends the whole group as soon as one process leaves.

    Raises:
        SystemExit: the command failed; 2 for a user's mistake, 1 for anything else.
    """
    processes: Processes | None = None
    code, reason = EXIT_DONE, "done"
    try:
        config, mistake = None, None
        try:
            config = parse()
            refuse_engines()
        except UserError as error:
            mistake = error
        # This one is answered by each process for itself: what it refuses is a group that cannot be joined.
        world_size = launched_world_size()
        if mistake is not None and world_size == 1:
            raise mistake
        processes = join()
        with processes.together():
            if mistake is not None:
                raise mistake
        assert config is not None
        body(config, processes)
    except UserError as error:
        code, reason = EXIT_USER, str(error)
        rank = processes.rank if processes else _launched_rank()
        if rank == 0 or not error.agreed:
            print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        if error.agreed and processes is not None:
            processes.all_gather(None)
    except PeerError as error:
        code, reason = EXIT_FAILURE, str(error)
    except KeyboardInterrupt:
        code, reason = EXIT_FAILURE, "interrupted"
        if processes is None or processes.is_main:
            print("interrupted", file=sys.stderr, flush=True)
    except Exception as error:
        code, reason = EXIT_FAILURE, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    finally:
        if processes is not None:
            try:
                for leave in processes.at_exit:
                    leave(code, reason)
            finally:
                processes.at_exit.clear()
                leave_group(processes)
    if code != EXIT_DONE:
        raise SystemExit(code)


def _launched_rank() -> int:
    """The launcher's RANK, for messages about a group that could not be joined; 0 where it is missing or no number."""
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


def launched_world_size() -> int:
    """The number of processes that the launcher says it started (WORLD_SIZE), 1 without a launcher.

    Raises:
        UserError: the launcher's variables contradict each other or are incomplete; waiting for the missing rank would hang.
    """
    adopt_debug_group()
    size = env_int("WORLD_SIZE", 1)
    if size > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise UserError(
                f"WORLD_SIZE is {size}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
                "start all processes with `accelerate launch` or `torchrun`, or unset WORLD_SIZE for one process"
            )
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


def join() -> Processes:
    """Join the process group that the launcher's environment describes: nccl on CUDA, gloo on a machine without GPU.

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
    try:
        # Without cpu=True, Accelerate makes every process of a machine without GPU believe that it is the only one.
        state = PartialState(cpu=device is None or env_true("ACCELERATE_USE_CPU"))
    except (RuntimeError, ValueError) as error:
        # Half-made state would answer the next attempt in this Python, for example in a notebook.
        PartialState._reset_state()
        raise _network_error(error) from error
    size = env_int("WORLD_SIZE", 1)
    if state.num_processes != size:
        raise UserError(
            f"the launcher started {size} processes, but Accelerate counts {state.num_processes}: start them with "
            "`accelerate launch` or `torchrun`"
        )
    if dist.is_initialized():
        return Processes(state, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
    return Processes(state)


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


def _network_error(error: Exception) -> Exception:
    text = str(error)
    place = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '29500')}"
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
    return error


def leave_group(processes: Processes) -> None:
    """Destroy the process group and forget Accelerate's state, so that another run can start in this Python.

    gloo's threads live as long as anything refers to the group (this object, DDP, a cycle around them), and one that still holds a
    tensor when the interpreter ends aborts it: "terminate called without an active exception". So everything is let go here.
    """
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    processes.control = None
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
