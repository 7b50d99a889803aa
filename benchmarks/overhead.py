"""What an update of ours costs beyond forward, loss, backward and optimizer, on one process, in the real command with all its hooks.

    python benchmarks/overhead.py --rounds 6
    python benchmarks/overhead.py --rounds 6 --mixed_precision bf16      # other flags are the trainer's

The innermost parts of each update are timed by wrapping them (`wrap_functions` and `wrap_handles` name them) while `trainer.main` trains;
what is left of an epoch's training is hooks, log lines, metrics, and Accelerate's wrappers. The price is two readings of a clock for each
part; it is measured on a function that does nothing, and printed. The first epoch is left out; medians over the others.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

MODEL = ("forward", "loss", "backward", "optimizer step", "zero_grad")
OURS = ("normalisation", "waiting for data", "hooks, log, metrics, wrappers")


class Clock:
    """Seconds spent inside wrapped functions, and the number of calls."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*MODEL, *OURS), 0.0)
        self.calls = 0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            self.calls += 1
            return result

        return timed

    def price(self, calls: int = 100_000) -> float:
        """Seconds of processor time that wrapping adds to a call."""

        def nothing() -> None: ...

        def loop(function: Callable[[], Any]) -> float:
            start = time.process_time()
            for _ in range(calls):
                function()
            return time.process_time() - start

        self.clear()
        wrapped = self.wrap("forward", nothing)
        return min(loop(wrapped) - loop(nothing) for _ in range(5)) / calls


def wrap_functions(clock: Clock) -> None:
    """The class's own forward (below autocast's, which holds it once the model is prepared), the loss, and torch's engine."""
    import torch

    from trainer.models.convnet import ConvNet

    ConvNet.forward = clock.wrap("forward", ConvNet.forward)  # type: ignore[method-assign]
    torch.nn.functional.cross_entropy = clock.wrap("loss", torch.nn.functional.cross_entropy)
    torch.autograd.backward = clock.wrap("backward", torch.autograd.backward)


def wrap_handles(clock: Clock, run: Any) -> None:
    """torch's optimizer (below Accelerate's), and the pixels' normalisation."""
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    optimizer.step = clock.wrap("optimizer step", optimizer.step)
    optimizer.zero_grad = clock.wrap("zero_grad", optimizer.zero_grad)
    run.normalize.forward = clock.wrap("normalisation", run.normalize.forward)


def measure(rounds: int, flags: list[str]) -> dict[str, Any]:
    """The parts of an update in microseconds, one figure for each epoch."""
    import trainer.main
    from trainer import loop

    clock = Clock()
    epochs: list[tuple[dict[str, float], float]] = []
    train_epoch, batches_of = loop.train_epoch, loop.timed

    def batches(loader: Any, run: Any) -> Iterator[Any]:
        take = clock.wrap("waiting for data", lambda iterator: next(iterator, None))
        iterator = batches_of(loader, run)
        while (batch := take(iterator)) is not None:
            yield batch

    def measured(run: Any, hooks: Any) -> None:
        if not epochs:
            wrap_handles(clock, run)
        clock.clear()
        before, start = run.state.step, time.perf_counter()
        train_epoch(run, hooks)
        seconds, updates = time.perf_counter() - start, run.state.step - before
        clock.seconds[OURS[-1]] = seconds - sum(clock.seconds.values())
        epochs.append(({part: 1e6 * spent / updates for part, spent in clock.seconds.items()}, clock.calls / updates))

    wrap_functions(clock)
    loop.train_epoch, loop.timed = measured, batches
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.main.main([*flags, "--epochs", str(rounds + 1), "--output_dir", str(Path(folder) / "run")])
    parts = {part: [figures[part] for figures, _ in epochs[1:]] for part in (*MODEL, *OURS)}
    return {"parts": parts, "clocks_us": 1e6 * epochs[-1][1] * clock.price()}


def shares(parts: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    """The percentage of an update that `names` take, for each epoch."""
    return [
        100 * sum(parts[name][epoch] for name in names) / sum(of[epoch] for of in parts.values()) for epoch in range(len(parts[names[0]]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="epochs that are measured")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--result", help="a JSON file for the figures")
    arguments, flags = parser.parse_known_args()
    result = measure(arguments.rounds, ["--batch_size", str(arguments.batch_size), *flags])
    parts = result["parts"]
    print("| part of an update | µs | % |\n|---|---|---|")
    for part in (*MODEL, *OURS):
        print(f"| {part} | {statistics.median(parts[part]):.0f} | {statistics.median(shares(parts, (part,))):.1f} |")
    result["beyond_percent"] = statistics.median(shares(parts, OURS))
    result["rest_percent"] = statistics.median(shares(parts, OURS[-1:]))
    print(f"\nAll but {', '.join(MODEL)}: {result['beyond_percent']:.1f} %. The clocks themselves add {result['clocks_us']:.1f} µs.")
    if arguments.result:
        Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
