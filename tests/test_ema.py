"""The averaged weights: their numbers, when they stand in for the weights, and what is evaluated, exported and gone on with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers import alone_run, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, session
from trainer.checkpoint import listed
from trainer.ema import Ema
from trainer.export import read_model
from trainer.hooks.base import Hook
from trainer.hooks.gather_metrics import GatherMetrics
from trainer.hooks.log import describe
from trainer.loop import evaluate, fit
from trainer.runtime import Processes, UserError
from trainer.state import Run


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 16)


class Weights(Hook):
    """The weights and their averages after each update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.averages: list[dict[str, Tensor]] = []

    def on_step_end(self, run: Run) -> None:
        self.weights.append({name: parameter.detach().clone() for name, parameter in run.module.named_parameters()})
        if run.ema is not None:
            self.averages.append({name: average.clone() for name, average in run.ema.averages.items()})


def train(processes: Processes, folder: Path, out: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, and what an evaluation of the live weights says afterwards."""
    run = make_run(processes, folder, output_dir=str(out), **{"batch_size": 4, "epochs": 2, "lr": 1e-2, "cpu_threads": 1, **knobs})
    first = {name: parameter.detach().clone() for name, parameter in run.module.named_parameters()}
    weights = Weights()
    fit(run, needed_hooks(weights))
    metrics, state = run.state.metrics, tensors(run.module)
    evaluate(run, needed_hooks())
    return {
        "first": first,
        "weights": weights.weights,
        "averages": weights.averages,
        "state": state,
        "metrics": metrics,
        "live": run.state.metrics,
        "best": run.state.best,
    }


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_the_average_after_each_update_by_hand(ids: Path, tmp_path: Path, decay: float) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        run = alone(train, ids, tmp_path / "out", {"ema_decay": decay})
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(run["weights"]) == 32
    expected = run["first"]
    for step, (weights, averages) in enumerate(zip(run["weights"], run["averages"], strict=True), start=1):
        d = min(decay, (1 + step) / (10 + step))
        expected = {name: d * expected[name] + (1 - d) * weights[name] for name in expected}
        for name, average in averages.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-12, atol=1e-15)
    assert not torch.allclose(averages["fc.weight"], weights["fc.weight"])


def test_it_changes_nothing_about_the_training(ids: Path, tmp_path: Path) -> None:
    averaged = alone(train, ids, tmp_path / "averaged", {"ema_decay": 0.9})
    plain = alone(train, ids, tmp_path / "plain", {})
    for name, tensor in plain["state"].items():
        assert torch.equal(averaged["state"][name], tensor), name
    assert averaged["live"] == plain["live"] == plain["metrics"]
    assert averaged["metrics"]["loss"] != plain["metrics"]["loss"]


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_evaluated_and_exported(two_ranks: Ranks, ids: Path, tmp_path: Path, count: int) -> None:
    """The averages with the module's own BatchNorm statistics; on two ranks the averages are equal without a word between them."""
    knobs = {"ema_decay": 0.8, "epochs": 1}
    ranks = two_ranks.run(train, ids, tmp_path / "out", knobs) if count == 2 else [alone(train, ids, tmp_path / "out", knobs)]
    for rank in ranks:
        for name, average in rank["averages"][-1].items():
            assert torch.equal(average, ranks[0]["averages"][-1][name])
    zero = ranks[0]
    expected = zero["state"] | zero["averages"][-1]
    exported = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name]), name
    model, config = read_model(tmp_path / "out" / "model")
    assert config["ema_decay"] == 0.8
    assert (config["acc1"], config["loss"]) == (zero["metrics"]["acc1"], zero["metrics"]["loss"])
    loss, right = evaluated_alone(ids, model)
    assert zero["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert zero["metrics"]["acc1"] == 100 * right / 16
    assert zero["live"]["loss"] != pytest.approx(loss, abs=1e-3)


def evaluated_alone(folder: Path, model: nn.Module) -> tuple[float, int]:
    with alone_run(folder) as run, torch.no_grad():
        logits = model(run.normalize(run.data.test.gather(list(range(16)))))
        labels = run.data.test.labels
        return float(nn.functional.cross_entropy(logits, labels)), int((logits.argmax(1) == labels).sum())


def test_the_weights_are_back_to_the_bit_whatever_ends_the_block() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-0.0, torch.nan], [torch.inf, 1e-45]]))
    ema = Ema(module, 0.9)
    for average in ema.averages.values():
        average.fill_(7.0)
    before = {name: tensor.view(torch.int32).clone() for name, tensor in tensors(module).items()}
    addresses = [parameter.data_ptr() for parameter in module.parameters()]

    def stop() -> None:
        with ema.in_place():
            assert all(bool((parameter == 7).all()) for parameter in module.parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    for name, tensor in tensors(module).items():
        assert torch.equal(tensor.view(torch.int32), before[name])
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    assert all(bool((average == 7).all()) for average in ema.averages.values())
    assert all(parameter.requires_grad for parameter in module.parameters())


class Fail(GatherMetrics):
    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        raise OSError("a disk is gone")


def test_an_evaluation_that_fails_leaves_the_weights(ids: Path, tmp_path: Path) -> None:
    with alone_run(ids, ema_decay=0.9, epochs=1, output_dir=str(tmp_path / "out")) as run:
        weights = Weights()
        with pytest.raises(OSError, match="a disk is gone"):
            fit(run, needed_hooks(weights, Fail()))
        for name, parameter in run.module.named_parameters():
            assert torch.equal(parameter, weights.weights[-1][name])


class Overflow(nn.Module):
    """A gradient that overflows at the passes `at`."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.at, self.passes = nn.Linear(64, 10), at, 0

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.flatten(1))
        if self.training:
            logits = logits / 1e-38 if self.passes in self.at else logits
            self.passes += 1
        return logits


def skipping(processes: Processes, folder: Path, out: Path) -> tuple[int, int, bool]:
    module = Overflow((1, 2))
    run = make_run(
        processes, folder, module, mixed_precision="fp16", ema_decay=0.9, batch_size=8, epochs=1, output_dir=str(out), max_steps=3
    )
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    weights = Weights()
    fit(run, needed_hooks(weights))
    for step, after in enumerate(weights.weights, start=1):
        expected = {name: expected[name].lerp(after[name], 1 - min(0.9, (1 + step) / (10 + step))) for name in expected}
    assert run.ema is not None
    return run.state.step, run.state.skipped, all(torch.equal(run.ema.averages[name], expected[name]) for name in expected)


def test_a_skipped_update_does_not_move_the_average(ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_FP16_ON_CPU", "1")
    assert alone(skipping, ids, tmp_path / "out") == (3, 2, True)


def test_the_block_and_the_results_say_so(ids: Path, tmp_path: Path) -> None:
    with alone_run(ids, ema_decay=0.999, mixup=0.2, cutmix=1.0, label_smoothing=0.1, optimizer="sgd", nesterov=True) as run:
        rows = dict(describe(run))
    assert rows["ema"] == "decay 0.999: accuracy, loss and the exported model are those of the averaged weights"
    assert rows["loss"] == "label smoothing 0.1, mixup alpha 0.2 or cutmix alpha 1"
    assert rows["optimizer"] == "sgd, weight decay 0.5, Nesterov momentum 0.9"
    with alone_run(ids, weight_decay_1d=False, cutmix=0.5) as run:
        rows = dict(describe(run))
    assert "ema" not in rows
    assert rows["loss"] == "cutmix alpha 0.5"
    assert rows["optimizer"] == "adamw, weight decay 0.5, no decay of biases and normalisation weights"


def gone_on_with(processes: Processes, dataset: Path, folder: Path, stop: StopAt | None, knobs: dict[str, Any]) -> Session:
    return session(processes, dataset, folder, stop, **{"epochs": 2, "resume_from_checkpoint": "auto", **knobs})


def test_it_can_begin_end_and_change_at_a_resume(ids: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plain = alone(gone_on_with, ids, folder, StopAt(0, 3), {})
    assert not list(folder.rglob("ema.safetensors"))
    begun = alone(gone_on_with, ids, folder, StopAt(0, 4), {"ema_decay": 0.9})
    assert "the average of --ema_decay begins with the checkpoint's weights" in begun.notes
    assert "changed: ema_decay None -> 0.9" in begun.notes
    for name, average in begun.averages.items():
        expected = plain.weights[name].lerp(begun.weights[name], 1 - (1 + 4) / (10 + 4))
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-8)
    assert load_file(listed(folder / "checkpoints")[-1] / "ema.safetensors").keys() == begun.averages.keys()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    other = alone(gone_on_with, ids, folder, StopAt(0, 5), {"ema_decay": 0.2})
    assert "changed: ema_decay 0.9 -> 0.2" in other.notes
    assert not any("begins with" in note for note in other.notes)
    for name, average in other.averages.items():
        torch.testing.assert_close(average, begun.averages[name].lerp(other.weights[name], 0.8), rtol=1e-6, atol=1e-8)
    ended = alone(gone_on_with, ids, copy, None, {})
    assert "changed: ema_decay 0.9 -> None" in ended.notes
    assert json.loads((copy / "results.json").read_text())["ema_decay"] is None


def test_averages_of_another_model_are_refused() -> None:
    module = nn.Linear(2, 3)
    ema = Ema(module, 0.9)
    ema.load({"weight": torch.ones(3, 2), "bias": torch.zeros(3)})
    assert bool((ema.averages["weight"] == 1).all())
    ema.load({})
    assert torch.equal(ema.averages["weight"], module.weight)
    for wrong, message in (
        ({"weight": torch.ones(3, 2)}, "no average for the weight bias"),
        ({"weight": torch.ones(2, 3), "bias": torch.zeros(3)}, "no average for the weight weight of shape"),
        ({"weight": torch.ones(3, 2), "bias": torch.zeros(3), "more": torch.zeros(1)}, "its average more is of no weight"),
    ):
        with pytest.raises(ValueError, match=message):
            ema.load(wrong)


def poisoned(processes: Processes, folder: Path, out: Path) -> str:
    class Poison(Hook):
        def on_epoch_end(self, run: Run) -> None:
            assert run.ema is not None
            run.ema.averages["fc.bias"][0] = torch.nan

    run = make_run(processes, folder, ema_decay=0.9, epochs=1, output_dir=str(out))
    hooks = needed_hooks()
    with pytest.raises(UserError) as refused:
        fit(run, type(hooks)((Poison(), *hooks)))
    return str(refused.value)


def test_an_average_that_is_not_finite_is_not_exported(ids: Path, tmp_path: Path) -> None:
    assert alone(poisoned, ids, tmp_path / "out").startswith("the average of fc.bias holds values that are not finite at update 2")
    assert not (tmp_path / "out" / "model").exists()
