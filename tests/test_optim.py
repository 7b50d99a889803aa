"""Learning rates against formulas written out by hand, and the optimizers' own numbers."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import Config
from trainer.data.loaders import plan_batches
from trainer.data.sampler import BatchPlan
from trainer.optim import LrPlan, build_optimizer, plan_lr

WARM = [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("constant", [0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.4, 0.32, 0.24, 0.16, 0.08, 0.0, 0.0]),
        ("cosine", [0.2 + 0.2 * math.cos(math.pi * done / 5) for done in (0, 1, 2, 3, 4, 5, 5)]),
    ],
)
def test_rates_of_a_run_of_eight_updates(kind: str, after: list[float]) -> None:
    plan = LrPlan(peak=0.4, kind=kind, warmup=3, total=8)
    assert [plan.at(step) for step in range(10)] == pytest.approx([*WARM, *after], abs=1e-15)
    assert plan.at(10**9) == pytest.approx(after[-1], abs=1e-15)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_update_has_the_peak(kind: str) -> None:
    assert LrPlan(0.4, kind, 0, 5).at(0) == 0.4
    assert LrPlan(0.4, kind, 0, 1).at(0) == 0.4


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_never_divides_by_zero(kind: str) -> None:
    plan = LrPlan(0.4, kind, 3, 3)
    assert [plan.at(step) for step in range(4)] == pytest.approx([*WARM, 0.4])


def test_the_cosine_is_half_at_half_time_and_falls_all_the_way() -> None:
    plan = LrPlan(1.0, "cosine", 10, 110)
    assert plan.at(60) == pytest.approx(0.5)
    rates = [plan.at(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (LrPlan(0.003, "cosine", 38, 375), "0 -> 0.003 over 38 updates, then cosine to 0 at update 375"),
        (LrPlan(1e-4, "constant", 0, 9), "0.0001 constant"),
        (LrPlan(0.5, "linear", 0, 9), "0.5 linear to 0 at update 9"),
    ],
)
def test_the_plan_is_readable(plan: LrPlan, text: str) -> None:
    assert str(plan) == text


@pytest.mark.parametrize(("scale_lr", "factor"), [("none", 1.0), ("linear", 6.0), ("sqrt", math.sqrt(6))])
def test_scale_lr_counts_processes_and_accumulation(scale_lr: Any, factor: float) -> None:
    config = Config(lr=0.1, scale_lr=scale_lr, lr_scheduler="linear", warmup_epochs=0.5, batch_size=4, gradient_accumulation_steps=2)
    plan = BatchPlan(samples=240, processes=3, batch_size=4, accumulation=2)
    assert plan.updates == 10
    lr_plan = plan_lr(config, plan, 30)
    assert (lr_plan.kind, lr_plan.warmup, lr_plan.total) == ("linear", 5, 30)
    assert lr_plan.peak == lr_plan.at(5) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(("epochs", "total", "warmup"), [(0.0, 30, 0), (0.3, 30, 3), (2.0, 30, 20), (2.0, 7, 7), (0.04, 30, 0)])
def test_warm_up_is_in_epochs_and_at_most_the_run(epochs: float, total: int, warmup: int) -> None:
    assert plan_lr(Config(warmup_epochs=epochs), BatchPlan(100, 1, 10, 1), total).warmup == warmup


def test_the_rates_do_not_depend_on_the_number_of_processes() -> None:
    """With the same global batch, the rate of each update is the same: the schedule does not run faster with more processes."""
    config = Config(global_batch_size=48)
    rates = []
    for processes in (1, 2, 3):
        plan = plan_batches(config, 960, processes)
        rates.append([plan_lr(config, plan, 3 * plan.updates).at(step) for step in range(60)])
    assert rates[0] == rates[1] == rates[2]
    assert len(set(rates[0])) > 50


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.2, "momentum": 0.7, "weight_decay": 0.03, "nesterov": False, "dampening": 0}),
        ("adam", torch.optim.Adam, {"lr": 0.2, "weight_decay": 0.03, "betas": (0.9, 0.999), "eps": 1e-8, "decoupled_weight_decay": False}),
        ("adamw", torch.optim.AdamW, {"lr": 0.2, "weight_decay": 0.03, "betas": (0.9, 0.999), "eps": 1e-8, "decoupled_weight_decay": True}),
    ],
)
def test_optimizers(name: Any, kind: type, expected: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(Config(optimizer=name, lr=0.2, momentum=0.7, weight_decay=0.03), model)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in expected} == expected
    assert [id(parameter) for parameter in group["params"]] == [id(p) for p in (model[0].weight, model[1].weight, model[1].bias)]


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        # From 1.0 with gradient 2: SGD 1 - 0.1 x (2 + 0.5 x 1); Adam's first step is the rate itself; AdamW also shrinks by 0.1 x 0.5.
        ("sgd", 0.75),
        ("adam", 0.9),
        ("adamw", 0.85),
    ],
)
def test_the_first_update_by_hand(name: Any, weight: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(Config(optimizer=name, lr=0.1, momentum=0.9, weight_decay=0.5), model)
    (2 * model.weight).sum().backward()
    optimizer.step()
    assert model.weight.item() == pytest.approx(weight, abs=1e-6)
