"""A training that was stopped and resumed equals the one that was not, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.helpers import write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, assert_equal, session
from trainer.optim import OPTIMIZERS

# 96 images, batch 8: 12 updates an epoch on one process, 6 on two.
CASES: dict[str, tuple[dict[str, Any], StopAt, dict[str, str]]] = {
    "inside an epoch": ({}, StopAt(0, 7), {}),
    "at an epoch's end": ({}, StopAt(0, 11), {}),
    "in the evaluation": ({}, StopAt(0, 12, evaluation=True), {}),
    "accumulation": ({"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}, StopAt(0, 4), {}),
    "workers": ({"num_workers": 2}, StopAt(0, 15), {}),
    "sgd, channels first": ({"optimizer": "sgd", "lr_scheduler": "constant", "channels_last": "off"}, StopAt(0, 2), {}),
    "mixed, smoothed and averaged": (
        {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1, "ema_decay": 0.9, "gradient_accumulation_steps": 2},
        StopAt(0, 8),
        {},
    ),
    "averaged, in the evaluation": ({"ema_decay": 0.9}, StopAt(0, 12, evaluation=True), {}),
    "bf16": ({"mixed_precision": "bf16"}, StopAt(0, 7), {}),
    "fp16": ({"mixed_precision": "fp16"}, StopAt(0, 7), {"TRAINER_FP16_ON_CPU": "1"}),
}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 96, 16)


@pytest.mark.parametrize("case", CASES)
def test_one_process(ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    knobs, stop, environment = CASES[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    whole = alone(session_with, ids, tmp_path / "whole", None, knobs)
    first = alone(session_with, ids, tmp_path / "parts", stop, knobs)
    second = alone(session_with, ids, tmp_path / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    check(whole, first, second, stop)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(two_ranks: Ranks, ids: Path, tmp_path: Path, case: str) -> None:
    knobs, stop, environment = CASES[case]
    stop = StopAt(1, max(1, stop.step // 2), stop.evaluation)
    whole = two_ranks.run(session_with, ids, tmp_path / "whole", None, knobs, environment=environment)
    first = two_ranks.run(session_with, ids, tmp_path / "parts", stop, knobs, environment=environment)
    again = knobs | {"resume_from_checkpoint": "auto"}
    second = two_ranks.run(session_with, ids, tmp_path / "parts", None, again, environment=environment)
    for rank in range(2):
        check(whole[rank], first[rank], second[rank], stop)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"sgd", "adam", "adamw"}))
def test_other_optimizers(ids: Path, tmp_path: Path, name: str) -> None:
    """With two groups of parameters, whose order is not the model's. Adam is AdamW, and SGD is above."""
    knobs = {"optimizer": name, "weight_decay_1d": False, "batch_size": 16, "epochs": 1, "lr": 1e-3}
    check_stopped(ids, tmp_path, knobs, StopAt(0, 3))


def torchs_rates(kind: str, evaluations: list[float]) -> list[float]:
    """Of four epochs of six updates, the first three of which warm up."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.03)
    scheduler: Any
    if kind == "one_cycle":
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, 0.03, 24, pct_start=4 / 24, div_factor=25, final_div_factor=400, cycle_momentum=False
        )
    elif kind == "step":
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    else:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0, eps=0.0)
    rates = []
    for update in range(24):
        rate = optimizer.param_groups[0]["lr"]
        rates.append(rate if kind == "one_cycle" or update >= 3 else rate * (update + 1) / 4)
        optimizer.step()
        if kind == "one_cycle":
            scheduler.step()
        elif update % 6 == 5:
            scheduler.step(*([evaluations[update // 6]] if kind == "plateau" else []))
    return rates


@pytest.mark.parametrize("kind", ["step", "one_cycle", "plateau"])
def test_schedules(ids: Path, tmp_path: Path, kind: str) -> None:
    """The rate of every update is that of torch's own schedule, stopped in between or not."""
    knobs = {"lr_scheduler": kind, "lr_step_epochs": 1, "plateau_patience": 1, "lr_gamma": 0.5, "lr": 0.03}
    knobs |= {"warmup_epochs": 0.5, "batch_size": 16, "epochs": 4, "log_interval": 1, "optimizer": "sgd"}
    _, second = check_stopped(ids, tmp_path, knobs, StopAt(0, 14))
    rates = [entry["lr"] for entry in second.metrics if entry["event"] == "train"]
    losses = [entry["loss"] for entry in second.metrics if entry["event"] == "eval"]
    assert rates == pytest.approx(torchs_rates(kind, losses), rel=1e-12)
    assert rates[-1] < rates[12] < rates[3], "the rate stood still"


def test_a_plateau_is_looked_for_after_the_warm_up(ids: Path, tmp_path: Path) -> None:
    knobs = {"lr_scheduler": "plateau", "plateau_patience": 1, "batch_size": 16, "epochs": 2}
    judged = {}
    for warmup in (1.5, 2.0):
        state = alone(session_with, ids, tmp_path / f"{warmup}", None, knobs | {"warmup_epochs": warmup}).state
        judged[warmup] = state["lowest_loss"] is not None
        if warmup == 1.5:
            assert state["lowest_loss"] == state["metrics"]["loss"], "the first epoch's evaluation came too early"
    assert judged == {1.5: True, 2.0: False}


def check_stopped(dataset: Path, folder: Path, knobs: dict[str, Any], stop: StopAt) -> tuple[Session, Session]:
    whole = alone(session_with, dataset, folder / "whole", None, knobs)
    first = alone(session_with, dataset, folder / "parts", stop, knobs)
    second = alone(session_with, dataset, folder / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    check(whole, first, second, stop)
    return first, second


def session_with(processes: Any, dataset: Path, folder: Path, stop: StopAt | None, knobs: dict[str, Any]) -> Session:
    return session(processes, dataset, folder, stop, **knobs)


def check(whole: Session, first: Session, second: Session, stop: StopAt) -> None:
    assert whole.interrupted is None
    assert first.interrupted == "SIGTERM"
    assert first.state["step"] <= stop.step + (not stop.evaluation), "it stopped late"
    assert first.scaler is None or first.scaler["_growth_tracker"] > 0, "a scaler as new would do"
    assert second.interrupted is None
    assert second.order, "nothing was left to train: the stop came too late to test anything"
    assert_equal(second, whole)
    assert first.order + second.order == whole.order
