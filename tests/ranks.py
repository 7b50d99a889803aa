"""Several real processes joined by gloo, started once and used by many tests."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What a launcher sets for each process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


class Ranks:
    """`count` processes that run functions together: `ranks.run(function, *args)` is each rank's `function(processes, *args)`.

    The function is found by its module and name, joins a fresh process group each time, and has `TIMEOUT` seconds: a hang is a
    failure. One that joins by itself, as a command does, is `ranks.run_apart(function, *args)`: each rank's `function(*args)`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.connections: list[Connection] = []
        self.children: list[Any] = []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            here, there = context.Pipe()
            child = context.Process(target=serve, args=(rank, self.count, there), daemon=False)
            child.start()
            there.close()
            self.connections.append(here)
            self.children.append(child)

    def stop(self) -> None:
        for child in self.children:
            child.kill()
            child.join()
        self.connections, self.children = [], []

    def run(self, function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] | None = None) -> list[Any]:
        """`environment`: variables beside the launcher's; None takes one away."""
        return self.run_apart(alone, function, *args, environment=environment)

    def run_apart(self, function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] | None = None) -> list[Any]:
        if not self.children:
            self.start()
        port = free_port()
        for connection in self.connections:
            connection.send((function, args, port, environment or {}))
        results = []
        for rank, connection in enumerate(self.connections):
            try:
                if not connection.poll(TIMEOUT):
                    raise RankError(f"rank {rank} of {self.count} did not end within {TIMEOUT:.0f} s")
                failed, result = connection.recv()
            except (EOFError, RankError) as error:
                self.stop()
                raise RankError(f"rank {rank} of {self.count}: {error!r}") from None
            if failed:
                self.stop()
                raise RankError(f"rank {rank} of {self.count}:\n{result}")
            results.append(result)
        return results


def serve(rank: int, count: int, connection: Connection) -> None:
    """The life of a rank: run what is asked for until killed."""
    # A spawned process would spawn its data workers too, each of which imports torch; a launcher's processes fork them.
    multiprocessing.set_start_method("fork", force=True)
    while True:
        function, args, port, environment = connection.recv()
        before = dict(os.environ)
        variables = rank_environment(rank, count, port) | environment
        try:
            os.environ.update({name: value for name, value in variables.items() if value is not None})
            for name in [name for name, value in variables.items() if value is None]:
                os.environ.pop(name, None)
            connection.send((False, function(*args)))
        except BaseException:
            connection.send((True, traceback.format_exc()))
        finally:
            os.environ.clear()
            os.environ.update(before)


def alone(function: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
    """`function(processes, *args, **knobs)` in this process, joined as the environment says: as the only one where it says nothing."""
    from trainer.runtime import end, join

    processes = join()
    try:
        return function(processes, *args, **knobs)
    finally:
        end(processes)
