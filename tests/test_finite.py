"""A loss or gradient that is not finite stops all ranks, names the samples, and leaves the newest finite checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import ids_of, make_run, needed_hooks, write_ids
from tests.ranks import Ranks, alone
from trainer.checkpoint import listed
from trainer.data.sampler import EpochSampler
from trainer.files import problem
from trainer.finite import Finding, Finite, Update, first_bad_tensor
from trainer.hooks.checkpoints import Checkpoints
from trainer.loop import MAX_SKIPS, fit
from trainer.models.convnet import ConvNet
from trainer.pace import Pace
from trainer.runtime import Processes, RunError

UPDATE = Update(0, 0, 0, 8)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 8)


class SquareRoot(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan


class Trap(nn.Module):
    """A ConvNet that goes wrong on the image number `bad`, in epoch `epoch` of 8 updates on two ranks."""

    def __init__(self, bad: int, where: str, calls_before: int) -> None:
        super().__init__()
        self.net, self.bad, self.where, self.calls_before, self.calls = ConvNet(1, (8, 8), 10), bad, where, calls_before, 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        if not self.training:
            return output
        self.calls += 1
        seen = ids_of((x * 255).round().to(torch.uint8))
        if self.calls > self.calls_before and (self.bad in seen or self.bad < 0):
            return output * math.nan if self.where == "loss" else SquareRoot.apply(output)
        return output


def train(processes: Processes, ids: Path, folder: Path, where: str, knobs: dict[str, Any], bad: int = 37) -> tuple[str, int, Any]:
    config: dict[str, Any] = {"batch_size": 4, "epochs": 3, "normalize": "none", "lr_scheduler": "constant", "lr": 1e-3} | knobs
    module = Trap(bad, where, 64 // 4 // processes.count if bad >= 0 else 0)
    run = make_run(processes, ids, module, output_dir=str(folder), **config)
    hooks = needed_hooks()
    with pytest.raises(RunError) as error:
        fit(run, needed_hooks(Checkpoints(tuple(hooks))))
    assert error.value.agreed
    processes.all_gather(None)
    file = folder / "not_finite.json"
    return str(error.value), run.state.step, json.loads(file.read_text()) if file.exists() else None


def batch_of(bad: int, epoch: int, size: int) -> tuple[int, list[int]]:
    """The update, from 0, and the samples of the update that holds the image."""
    sampler = EpochSampler(64, 0)
    sampler.set_epoch(epoch)
    order = sampler.order()
    update = order.index(bad) // size
    return update, order[update * size : (update + 1) * size]


@pytest.mark.parametrize("where", ["loss", "gradient norm"])
@pytest.mark.parametrize("knobs", [{}, {"mixed_precision": "bf16"}, {"max_grad_norm": 1.0}], ids=["fp32", "bf16", "clipped"])
def test_two_ranks_stop_together(two_ranks: Ranks, ids: Path, tmp_path: Path, where: str, knobs: dict[str, Any]) -> None:
    ends = two_ranks.run(train, ids, tmp_path / "run", where, knobs)
    assert ends[0] == ends[1], "all ranks say the same, at the same update"
    text, step, written = ends[0]
    update, samples = batch_of(37, 1, 8)
    assert text.startswith(f"the {where} is not finite in update {8 + update + 1} of epoch 2: its 8 samples are named in ")
    assert step <= 8 + update + 2, "read at the update after it"
    assert written["samples"] == samples
    assert 37 in written["samples"]
    assert (written["epoch"], written["step"]) == (2, 8 + update + 1)
    checkpoints = listed(tmp_path / "run" / "checkpoints")
    assert [path.name for path in checkpoints] == ["step_00000008"]
    assert problem(checkpoints[0]) is None
    assert "the newest checkpoint, " in text
    assert "step_00000008, is intact; lower --lr or set --max_grad_norm" in text


def test_before_ranks_that_agree_seldom_evaluate(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    """At the end of the first epoch, whose model would be the best so far."""
    (tmp_path / "run").mkdir()
    zero, one = two_ranks.run(train_at_leisure, ids, tmp_path / "run")
    assert zero == one
    assert zero[0].startswith("the loss is not finite in update 1 of epoch 1: its 8 samples are named in ")
    assert len(zero[2]["samples"]) == 8


def train_at_leisure(processes: Processes, ids: Path, folder: Path) -> tuple[str, int, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "due", lambda pace, processes: False)
        return train(processes, ids, folder, "loss", {}, bad=-1)


def test_accumulation(ids: Path, tmp_path: Path) -> None:
    text, _, written = alone(train, ids, tmp_path / "run", "loss", {"gradient_accumulation_steps": 4})
    update, samples = batch_of(37, 1, 16)
    assert written["samples"] == samples
    assert f"in update {4 + update + 1} of epoch 2: its 16 samples" in text


def test_a_checkpoint_at_that_very_update_is_not_written(ids: Path, tmp_path: Path) -> None:
    text, _, _ = alone(train, ids, tmp_path / "run", "loss", {"checkpointing_steps": 1, "save_total_limit": None})
    assert text.startswith("the loss is not finite in update "), "told by its samples, not by what it did to the weights"
    update, _ = batch_of(37, 1, 4)
    assert listed(tmp_path / "run" / "checkpoints")[-1].name == f"step_{16 + update:08d}", "the one before it is the last"


def test_a_scaler_that_skips_for_ever(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    environment = {"TRAINER_FP16_ON_CPU": "1"}
    knobs = {"mixed_precision": "fp16", "epochs": 20}
    ends = two_ranks.run(train, ids, tmp_path / "run", "gradient norm", knobs, -1, environment=environment)
    assert ends[0] == ends[1]
    text, step, written = ends[0]
    assert step == 0
    assert f"the gradient overflows at every loss scale: {MAX_SKIPS} skips in a row, the newest in update 1 of epoch 4" in text
    assert len(written["samples"]) == 8


def test_the_first_finding_stays() -> None:
    finite = Finite(torch.device("cpu"))
    fine, nan = torch.tensor(1.0), torch.tensor(math.nan)
    gradient = [torch.tensor([1.0, 3e38]), torch.tensor([2.0], dtype=torch.float64)]
    finite.see(UPDATE, [fine, fine], gradient)
    finite.see(UPDATE, [fine, fine], gradient, fine)
    assert finite.finding is None
    assert [tensor.tolist() for tensor in (*gradient, fine)] == [[1.0, float(torch.tensor(3e38))], [2.0], 1.0], "looked at, not changed"
    finite.see(UPDATE, [fine, nan], gradient, fine)
    finite.see(Update(0, 1, 8, 8), [fine], gradient, torch.tensor(math.inf))
    finding = finite.finding
    assert isinstance(finding, Finding)
    assert (finding.update, finding.reason, finding.grad_norm) == (UPDATE, "the loss is not finite", 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradients_bad_value_is_found_in_every_dtype(value: float, dtype: torch.dtype) -> None:
    for place in range(3):
        finite = Finite(torch.device("cpu"))
        bad = torch.ones(100, dtype=dtype)
        bad[(0, 63, 99)[place]] = value
        finite.see(UPDATE, [torch.tensor(1.0)], [torch.ones(3), bad])
        assert finite.finding == Finding(UPDATE, 1.0, None, "the gradient norm is not finite")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_first_bad_tensor(value: float) -> None:
    big = torch.full((3,), 3e38)
    tensors = {
        "count": torch.tensor([7]),
        "big": big,
        "fine": torch.ones(2),
        "bad": torch.tensor([1.0, value]),
        "worse": torch.tensor([value]),
    }
    assert first_bad_tensor(tensors) == "bad"
    assert first_bad_tensor({"big": torch.full((3,), 1.5e308, dtype=torch.float64)}) is None, "a sum may overflow"
    assert first_bad_tensor({"count": torch.tensor([7])}) is None
