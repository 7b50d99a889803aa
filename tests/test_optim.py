"""Learning rates against formulas written out by hand, and the optimizers' own numbers."""

import math
import random
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from trainer.config import Config
from trainer.data.loaders import plan_batches
from trainer.data.sampler import BatchPlan
from trainer.optim import OPTIMIZERS, LrPlan, build_optimizer, plan_lr
from trainer.state import TrainState

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


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step", "one_cycle", "plateau"])
def test_without_warm_up_the_first_update_has_the_peak(kind: str) -> None:
    assert LrPlan(0.4, kind, 0, 5).at(0) == 0.4
    assert LrPlan(0.4, kind, 0, 1).at(0) == 0.4


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step", "plateau"])
def test_a_warm_up_as_long_as_the_run_never_divides_by_zero(kind: str) -> None:
    plan = LrPlan(0.4, kind, 3, 3)
    assert [plan.at(step) for step in range(4)] == pytest.approx([*WARM, 0.4])


def test_a_one_cycle_that_ends_in_its_rise_never_divides_by_zero() -> None:
    plan = LrPlan(0.4, "one_cycle", 3, 3)
    assert [plan.at(step) for step in (0, 3, 4)] == pytest.approx([0.016, 0.4, 4e-5])


def rates_of_torch(scheduler: Callable[[Optimizer], Any], count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    schedule = scheduler(optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def warm(optimizer: Optimizer, after: Any) -> Any:
    rise = lr_scheduler.LinearLR(optimizer, 1 / 6, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [rise, after], milestones=[5])


@pytest.mark.parametrize(
    ("plan", "scheduler"),
    [
        (LrPlan(0.4, "cosine", 0, 20, floor=0.01), lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01)),
        (LrPlan(0.4, "cosine", 5, 20), lambda o: warm(o, lr_scheduler.CosineAnnealingLR(o, 15))),
        (LrPlan(0.4, "linear", 0, 20, floor=0.01), lambda o: lr_scheduler.LinearLR(o, 1, 0.01 / 0.4, total_iters=20)),
        (
            LrPlan(0.4, "one_cycle", 5, 20),
            lambda o: lr_scheduler.OneCycleLR(o, 0.4, 20, pct_start=6 / 20, div_factor=25, final_div_factor=400, cycle_momentum=False),
        ),
        (
            LrPlan(0.4, "one_cycle", 5, 20, floor=0.004),
            lambda o: lr_scheduler.OneCycleLR(o, 0.4, 20, pct_start=6 / 20, div_factor=25, final_div_factor=4, cycle_momentum=False),
        ),
    ],
    ids=["cosine", "warm-up and cosine", "linear", "one_cycle", "one_cycle to a floor"],
)
def test_rates_are_those_of_torch(plan: LrPlan, scheduler: Callable[[Optimizer], Any]) -> None:
    expected = rates_of_torch(scheduler, 20)
    assert [plan.at(step) for step in range(20)] == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert len(set(expected)) > 15


def test_steps_are_those_of_torch_and_stop_at_the_floor() -> None:
    expected = rates_of_torch(lambda o: lr_scheduler.StepLR(o, 3, gamma=0.3), 20)
    rates = [LrPlan(0.4, "step", 0, 200, gamma=0.3, period=3).at(10 * epoch, epoch) for epoch in range(20)]
    assert rates == pytest.approx(expected, rel=1e-12)
    floored = [LrPlan(0.4, "step", 0, 200, floor=0.01, gamma=0.3, period=3).at(10 * epoch, epoch) for epoch in range(20)]
    assert floored == pytest.approx([max(0.01, rate) for rate in expected], rel=1e-12)
    assert floored[-1] == 0.01


@pytest.mark.parametrize(("patience", "floor"), [(1, 0.0), (2, 0.0), (3, 0.003)])
def test_a_plateau_is_that_of_torch(patience: int, floor: float) -> None:
    """Ours counts the evaluations that make the rate fall; torch's patience those that do not yet."""
    generator = random.Random(patience)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience - 1, threshold=0.0, min_lr=floor, eps=0.0)
    plan, state, rates = LrPlan(0.4, "plateau", 0, 9, floor=floor, gamma=0.5), TrainState(), set()
    for epoch in range(60):
        loss = 1 / (1 + epoch / 5) + generator.choice([0.0, 0.1, 0.3, 0.9])
        state.metrics = {"loss": loss}
        state.judge_plateau(patience, 0.5)
        scheduler.step(loss)
        rate = plan.at(epoch, epoch, state.lr_factor)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        rates.add(rate)
    assert len(rates) > 4
    assert (min(rates) == floor) == (floor > 0)


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
        (LrPlan(0.5, "cosine", 0, 9, floor=0.01), "0.5 cosine to 0.01 at update 9"),
        (LrPlan(0.5, "step", 2, 90, gamma=0.2, period=30), "0 -> 0.5 over 2 updates, then x 0.2 every 30 epochs"),
        (LrPlan(0.5, "one_cycle", 3, 9), "0.02 -> 0.5 over 3 updates, then one_cycle to 5e-05 at update 9"),
        (LrPlan(0.5, "plateau", 0, 9, floor=0.1, patience=4), "0.5 x 0.1 after 4 epochs without a lower test loss, at least 0.1"),
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
    assert (lr_plan.floor, lr_plan.gamma, lr_plan.period, lr_plan.patience) == (0.0, 0.1, 30, 10)
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


def test_optimizers_are_torchs_own_and_take_what_they_know() -> None:
    assert list(OPTIMIZERS) == list(get_args(get_type_hints(Config)["optimizer"]))
    for name, kind in OPTIMIZERS.items():
        chosen: Any = name
        model = nn.Linear(3, 2)
        optimizer = build_optimizer(Config(optimizer=chosen, lr=0.2, momentum=0.7, weight_decay=0.03, nesterov=name == "sgd"), model)
        plain = kind(model.parameters(), lr=0.2, weight_decay=0.03)
        theirs = {key: value for key, value in plain.param_groups[0].items() if key != "params"}
        ours = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        changed = {"momentum": 0.7} if name in ("sgd", "rmsprop") else {}
        changed |= {"nesterov": True} if name == "sgd" else {}
        changed |= {"fused": True} if name in ("sgd", "adam", "adamw") else {}
        assert {key: value for key, value in ours.items() if theirs[key] != value} == changed


def test_biases_and_norms_need_not_decay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(Config(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.5, weight_decay_1d=False), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (0.95 if old.ndim > 1 else 1.0), rtol=1e-6, atol=0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    only = build_optimizer(Config(weight_decay_1d=False), nn.BatchNorm1d(2))
    assert [group["weight_decay"] for group in only.param_groups] == [0.0]


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
