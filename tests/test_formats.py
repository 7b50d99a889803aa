"""channels_last, compiled models and fused optimizers: what is asked for is what runs, and the numbers are the plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import alone_run, largest_difference, needed_hooks, tensors, write_ids
from trainer.hooks.log import describe
from trainer.loop import fit
from trainer.state import Run


def trained(folder: Path, **knobs: Any) -> tuple[dict[str, Tensor], Run]:
    with alone_run(
        folder, batch_size=16, epochs=1, output_dir=str(folder.parent / "out"), cpu_threads=1, optimizer="sgd", lr=0.05, **knobs
    ) as run:
        fit(run, needed_hooks())
        return tensors(run.module), run


@pytest.mark.parametrize(("asked", "last"), [("auto", True), ("on", True), ("off", False)])
def test_channels_last(tmp_path: Path, asked: str, last: bool) -> None:
    weights, run = trained(write_ids(tmp_path / "ids"), channels_last=asked)
    convolution = run.module.get_parameter("layer2.0.weight")
    assert convolution.is_contiguous(memory_format=torch.channels_last) == last
    images = run.normalize(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert images.is_contiguous(memory_format=torch.channels_last) == last
    state: dict[str, Tensor] = run.optimizer.state[convolution]
    assert state["momentum_buffer"].stride() == convolution.stride(), "fused kernels walk through memory"
    other = trained(tmp_path / "ids", channels_last="off")[0]
    assert largest_difference(weights, other) < 1e-3


@pytest.mark.parametrize(
    ("asked", "backend", "mode"),
    [("no", "NO", "default"), ("default", "INDUCTOR", "default"), ("reduce-overhead", "INDUCTOR", "reduce-overhead")],
)
def test_compile_asks_for_what_it_says(tmp_path: Path, asked: Any, backend: str, mode: str) -> None:
    """Not compiled here, which takes a minute: that is done at the first forward pass."""
    with alone_run(write_ids(tmp_path / "ids", train=32), compile=asked) as run:
        plugin = run.accelerator.state.dynamo_plugin
        assert (plugin.backend.value, plugin.mode) == (backend, mode)
        assert hasattr(run.model, "_orig_mod") == (asked != "no")
        assert dict(describe(run))["compile"] == ("no" if asked == "no" else "dynamo backend inductor" + f", {mode}" * (mode != "default"))


def test_the_flag_beats_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    for knobs, compiled in (({}, True), ({"compile": "no"}, False)):
        with alone_run(write_ids(tmp_path / "ids", train=32), **knobs) as run:
            assert hasattr(run.model, "_orig_mod") == compiled
