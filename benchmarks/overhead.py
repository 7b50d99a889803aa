"""What an update of ours costs beside one of a bare loop, on one process: the real command with all its hooks, and the loop of
contenders/limit.py, an epoch of each in turn in the same process, so that both see the same machine.

    python benchmarks/overhead.py --rounds 6
    python benchmarks/overhead.py --rounds 6 --mixed_precision bf16      # other flags are the trainer's

The innermost parts of each update are timed by wrapping them (`wrap_functions` and `wrap_optimizer` name them) while `trainer.main` trains;
what is left of an epoch is hooks, log lines, metrics, and Accelerate's wrappers, and what the bare loop has too: Python's own loop, and
letting go of the graph. The price is two readings of a clock for each part; it is measured on a function that does nothing, and printed.
The first epoch of each is left out; medians over the others. After each epoch, its evaluation beside the forward pass alone.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "contenders")]

MODEL = ("forward", "loss", "backward", "optimizer step", "zero_grad")
OURS = ("normalisation", "waiting for data", "hooks, log, metrics, wrappers")
REST = OURS[-1]


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

    def parts(self, work: Callable[[], int]) -> dict[str, float]:
        """Microseconds of each part, of an update; `work` returns how many it did."""
        self.clear()
        start = time.perf_counter()
        updates = work()
        self.seconds[REST] = time.perf_counter() - start - sum(self.seconds.values())
        return {part: 1e6 * spent / updates for part, spent in self.seconds.items()}

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


def wrap_optimizer(clock: Clock, optimizer: Any) -> None:
    optimizer.step = clock.wrap("optimizer step", optimizer.step)
    optimizer.zero_grad = clock.wrap("zero_grad", optimizer.zero_grad)


class Indexed:
    """A tensor whose indexing is the loop's waiting for data."""

    def __init__(self, tensor: Any, clock: Clock) -> None:
        self.tensor = tensor
        self.take = clock.wrap(OURS[1], tensor.__getitem__)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, indices: Any) -> Any:
        return self.take(indices)


class Bare:
    """The loop of contenders/limit.py over the run's images, with a model and an optimizer of its own."""

    def __init__(self, run: Any, clock: Clock) -> None:
        import torch

        from trainer.models.convnet import ConvNet

        train = run.data.train
        self.images: Any = Indexed(run.normalize(train.images), clock)
        self.labels: Any = Indexed(train.labels, clock)
        self.test_images = run.normalize(run.data.test.images)
        channels, *size = train.shape
        self.model = ConvNet(channels, tuple(size), len(run.data.classes)).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.config.lr, fused=True)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=run.accelerator.mixed_precision == "bf16")
        self.batch_size, self.eval_batch_size = run.config.batch_size, run.eval_loader.total_batch_size
        wrap_optimizer(clock, self.optimizer)

    def epoch(self) -> int:
        from limit import train

        return sum(1 for _ in train(self.model, self.optimizer, self.images, self.labels, self.batch_size, self.autocast))

    def forward(self) -> float:
        """Seconds."""
        from limit import forward

        return forward(self.model, self.test_images, self.autocast, self.eval_batch_size)[1]


def measure(rounds: int, flags: list[str]) -> dict[str, Any]:
    """One figure for each epoch: microseconds of the parts of an update, of ours and of the bare loop before and after it, and seconds of
    the evaluation and of the forward pass alone.
    """
    import trainer.main
    from trainer import loop

    clock = Clock()
    bare: list[Bare] = []
    ours: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    evaluations: list[float] = []
    forwards: list[float] = []
    calls = 0.0
    train_epoch, batches_of, evaluate = loop.train_epoch, loop.timed, loop.evaluate

    def batches(loader: Any, run: Any) -> Iterator[Any]:
        take = clock.wrap("waiting for data", lambda iterator: next(iterator, None))
        iterator = batches_of(loader, run)
        while (batch := take(iterator)) is not None:
            yield batch

    def measured(run: Any, hooks: Any) -> None:
        nonlocal calls
        if not bare:
            bare.append(Bare(run, clock))
            # Below Accelerate's.
            wrap_optimizer(clock, getattr(run.optimizer, "optimizer", run.optimizer))
            run.normalize.forward = clock.wrap("normalisation", run.normalize.forward)
            others.append(clock.parts(bare[0].epoch))

        def epoch() -> int:
            before = run.state.step
            train_epoch(run, hooks)
            return int(run.state.step - before)

        ours.append(clock.parts(epoch))
        calls = clock.calls / run.data.plan.updates
        others.append(clock.parts(bare[0].epoch))

    def evaluated(run: Any, hooks: Any) -> None:
        before = bare[0].forward()
        start = time.perf_counter()
        evaluate(run, hooks)
        evaluations.append(time.perf_counter() - start)
        forwards.append((before + bare[0].forward()) / 2)

    wrap_functions(clock)
    loop.train_epoch, loop.timed, loop.evaluate = measured, batches, evaluated
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.main.main([*flags, "--epochs", str(rounds + 1), "--output_dir", str(Path(folder) / "run")])
    around = [{part: (one[part] + other[part]) / 2 for part in one} for one, other in pairwise(others[1:])]
    return {
        "ours": ours[1:],
        "bare": around,
        "evaluation": evaluations[1:],
        "forward": forwards[1:],
        "clocks_us": 1e6 * calls * clock.price(),
    }


def summary(measured: dict[str, Any]) -> dict[str, float]:
    """Medians over the epochs.

    `beyond_percent`: of an update, all that is not the model's or the optimizer's; `rest_percent`: hooks, log, metrics and wrappers;
    `own_percent`: the same without what the bare loop has too; `limit_ratio`: the bare loop's time / ours, of an update, and
    `evaluation_ratio`, of the test images.
    """
    pairs = list(zip(measured["ours"], measured["bare"], strict=True))
    return {
        "beyond_percent": statistics.median(100 * sum(one[part] for part in OURS) / sum(one.values()) for one, _ in pairs),
        "rest_percent": statistics.median(100 * one[REST] / sum(one.values()) for one, _ in pairs),
        "own_percent": statistics.median(100 * (one[REST] - other[REST]) / sum(one.values()) for one, other in pairs),
        "limit_ratio": statistics.median(sum(other.values()) / sum(one.values()) for one, other in pairs),
        "evaluation_ratio": statistics.median(
            forward / seconds for forward, seconds in zip(measured["forward"], measured["evaluation"], strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="epochs that are measured")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--result", help="a JSON file for the figures")
    arguments, flags = parser.parse_known_args()
    measured = measure(arguments.rounds, ["--batch_size", str(arguments.batch_size), *flags])
    result = {**summary(measured), **measured}
    print("| part of an update | µs | % | bare loop, µs |\n|---|---|---|---|")
    for part in (*MODEL, *OURS):
        share = statistics.median(100 * one[part] / sum(one.values()) for one in measured["ours"])
        one, other = (statistics.median(figures[part] for figures in measured[whose]) for whose in ("ours", "bare"))
        print(f"| {part} | {one:.0f} | {share:.1f} | {other:.0f} |")
    print(
        f"\nAll but {', '.join(MODEL)}: {result['beyond_percent']:.1f} %. {REST.capitalize()} beyond what the bare loop has too: "
        f"{result['own_percent']:.1f} %.\nThe bare loop takes {result['limit_ratio']:.3f} of our time; its forward pass alone "
        f"{result['evaluation_ratio']:.2f} of our evaluation's.\nThe clocks themselves add {result['clocks_us']:.1f} µs."
    )
    if arguments.result:
        Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
