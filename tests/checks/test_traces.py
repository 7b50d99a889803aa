"""An inspection leaves no trace: weights, optimizer, generators and loaders are as before, and a training goes on as without it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.checks.tutorial import AccelerateScript, Script
from tests.helpers import make_run, write_ids
from tests.ranks import Ranks, alone
from trainer.checks import CHECKS
from trainer.checks.base import Subject, messengers
from trainer.checks.own import subject_of
from trainer.checks.preserve import copy_state
from trainer.checks.report import Report, run_checks
from trainer.checks.script import images_of, resuming
from trainer.doctor import inspect
from trainer.runtime import Processes


def train(script: Script, epochs: range) -> None:
    for epoch in epochs:
        script.arguments["start_epoch"](epoch)
        script.model.train()
        for batch in script.train_loader:
            script.train_step(batch)


def state(script: Script) -> dict[str, Any]:
    """Everything that training on depends on."""
    optimizer = getattr(script.optimizer, "optimizer", script.optimizer)
    momenta = [content["momentum_buffer"] for content in copy_state(optimizer.state).values()]
    return {
        "weights": torch.cat([tensor.double().flatten() for tensor in script.module.state_dict().values()]),
        "gradients": [None if p.grad is None else p.grad.clone() for p in script.module.parameters()],
        "modes": [module.training for module in script.module.modules()],
        "momenta": torch.cat([momentum.flatten() for momentum in momenta]) if momenta else None,
        "rate": optimizer.param_groups[0]["lr"],
        "scale": script.scaler.state_dict() if script.scaler is not None else None,
        "torch": torch.get_rng_state(),
        "numpy": list(numpy.random.get_state())[1:3],
        "random": random.getstate(),
        "iteration": getattr(script.train_loader, "iteration", None),
        "sampler": getattr(script.sampler, "epoch", None),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def trained(processes: Processes, folder: Path, options: dict[str, Any], inspected: bool) -> dict[str, Any]:
    """The state after two epochs, with or without an inspection between them."""
    make: Callable[..., Script] = AccelerateScript if options.get("accelerate") else Script
    script = make(processes, folder, "", **options)
    train(script, range(1))
    if inspected:
        before = state(script)
        assert inspect(**script.arguments).failed == []
        after = state(script)
        assert {key for key in before if not equal(before[key], after[key])} == set()
    train(script, range(1, 2))
    return state(script)


@pytest.mark.parametrize(
    "options", [{"augment": "torch"}, {"fp16": True, "dropout": True}, {"accelerate": True, "augment": "numpy"}], ids=str
)
def test_a_training_goes_on_as_if_it_had_not_been_inspected(two_ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    with_doctor = two_ranks.run(trained, tmp_path, options, True)
    without = two_ranks.run(trained, tmp_path, options, False)
    for one, other in zip(with_doctor, without, strict=True):
        assert {key for key in one if not equal(one[key], other[key])} == set()
    assert not torch.equal(with_doctor[0]["torch"], with_doctor[1]["torch"]), "the ranks' generators should differ"


def after_each_check(processes: Processes, folder: Path) -> dict[str, set[str]]:
    """What each check has changed; in the middle of an update, with gradients of a batch there."""
    script = Script(processes, folder, "", augment="torch", fp16=True)
    train(script, range(1))
    torch.nn.functional.cross_entropy(*script.forward(script.model, next(iter(script.train_loader)))).backward()
    script.model.eval()
    changed = {}
    with messengers() as own:
        images = images_of(train=script.train_loader, test=script.eval_loader)
        given = dict(script.arguments)
        load = given.pop("load")
        resumed = resuming(script.model, script.optimizer, script.train_loader, script.train_step, script.save, load)
        subject = Subject(processes=own, device=torch.device("cpu"), images=images, resumed=resumed, **given)
        for check in CHECKS:
            before = state(script)
            report = Report()
            run_checks(subject, (check,), report)
            assert report.results[check.name].status == "PASS", report.results
            after = state(script)
            changed[check.name] = {key for key in before if not equal(before[key], after[key])}
    return changed


def test_no_check_changes_anything(two_ranks: Ranks, tmp_path: Path) -> None:
    for changed in two_ranks.run(after_each_check, tmp_path):
        assert changed == {check.name: set() for check in CHECKS}


def own_run(processes: Processes, folder: Path, out: Path) -> tuple[Report, bool]:
    run = make_run(processes, folder, batch_size=8, cache="none")
    before = [tensor.clone() for tensor in run.module.state_dict().values()]
    generator = torch.get_rng_state()
    report = Report()
    with messengers() as own:
        run_checks(subject_of(run, own, (), out), CHECKS, report)
    run.close()
    same = all(map(torch.equal, before, run.module.state_dict().values())) and torch.equal(generator, torch.get_rng_state())
    return report, same and not run.optimizer.state and run.state.step == 0


def test_the_trainers_own_run_passes_untouched(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=61, test=17)
    for report, untouched in (*two_ranks.run(own_run, folder, tmp_path), alone(own_run, folder, tmp_path)):
        assert report.failed == [], report.results
        assert untouched
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids"]
