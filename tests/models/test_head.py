"""A frozen backbone: the numbers of a few lines of plain PyTorch, weights and statistics as they were, on one and on two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import alone_run, largest_difference, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, assert_equal, session
from trainer.checks import CHECKS
from trainer.checks.base import messengers
from trainer.checks.own import subject_of
from trainer.checks.report import Report, run_checks
from trainer.data.sampler import EpochSampler
from trainer.export import save_model
from trainer.hooks.log import describe
from trainer.loop import fit
from trainer.models.build import build_model
from trainer.models.head import classifier, freeze_backbone, train_mode
from trainer.runtime import Processes, UserError

MODELS = {"convnet": "fc", "shufflenet_v2_x0_5": "fc"}
EPOCHS, SEED = 2, 3
KNOBS: dict[str, Any] = {
    "freeze": "backbone",
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "lr_scheduler": "constant",
    "warmup_epochs": 0,
    "max_grad_norm": 1.0,
    "epochs": EPOCHS,
    "seed": SEED,
    "global_batch_size": 16,
    "cpu_threads": 1,
    "output_dir": "out",
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A data set, 160 + 16 images, and where a model with statistics that have moved is saved."""
    return write_ids(tmp_path / "ids", train=160), tmp_path / "pretrained"


def pretrain(name: str, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = build_model(name, 1, (8, 8), 10)
    for _ in range(5):
        model(torch.rand(16, 1, 8, 8))
    save_model(folder, model, {}, None)
    return tensors(model)


def trained(processes: Processes, data: Path, knobs: dict[str, Any]) -> tuple[dict[str, Tensor], int, str, list[str]]:
    torch.set_default_dtype(torch.float64)
    try:
        run = make_run(processes, data, **{**KNOBS, **knobs})
        fit(run, needed_hooks())
    finally:
        torch.set_default_dtype(torch.float32)
    held = [name for name, parameter in run.module.named_parameters() if parameter in run.optimizer.state]
    return tensors(run.module), run.sync_bn_layers, dict(describe(run))["model"], held


def plain_loop(name: str, start: dict[str, Tensor], data: Path) -> dict[str, Tensor]:
    """Linear probing on a whole batch, in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with alone_run(data, cpu_threads=1) as run:
            images, (mean,), (std,) = run.data.train, run.data.mean, run.data.std
            model = build_model(name, 1, (8, 8), 10)
            model.load_state_dict(start)
            model.to(memory_format=torch.channels_last)
            model.requires_grad_(False)
            head = model.get_submodule(MODELS[name]).requires_grad_(True)
            optimizer = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)
            sampler = EpochSampler(len(images), SEED)
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                model.train()
                for layer in model.modules():
                    if isinstance(layer, nn.BatchNorm2d):
                        layer.eval()
                for first in range(0, len(images), 16):
                    batch, labels, _ = images.__getitems__(sampler.order()[first : first + 16])
                    optimizer.zero_grad()
                    F.cross_entropy(model((batch.double() / 255 - mean) / std), labels).backward()
                    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                    optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return tensors(model)


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_a_plain_loop(two_ranks: Ranks, folders: tuple[Path, Path], name: str) -> None:
    data, file = folders
    start = pretrain(name, file)
    knobs = {"model": name, "weights": str(file)}
    expected = plain_loop(name, start, data)
    results = [alone(trained, data, knobs), *two_ranks.run(trained, data, knobs)]
    head = {f"{MODELS[name]}.weight", f"{MODELS[name]}.bias"}
    total, trainable = (sum(start[key].numel() for key in keys if "running" not in key and "tracked" not in key) for keys in (start, head))
    for number, (state, layers, words, held) in enumerate(results):
        assert state.keys() == start.keys()
        for key in state.keys() - head:
            assert torch.equal(state[key], start[key].to(state[key].dtype)), key
        for key in head:
            assert float((state[key] - start[key]).abs().max()) > 1e-3, "it did not train"
        difference = largest_difference({key: state[key] for key in head}, {key: expected[key] for key in head})
        assert difference == 0 if number == 0 else difference <= 1e-12
        assert layers == 0
        assert words == f"{name}, {trainable:,} of {total:,} parameters trained"
        assert set(held) == head, "the optimizer's state is of the classifier alone"


def test_without_it_all_is_trained(folders: tuple[Path, Path]) -> None:
    data, file = folders
    start = pretrain("convnet", file)
    state, _, words, held = alone(trained, data, {"freeze": "none", "weights": str(file)})
    assert [key for key in state if torch.equal(state[key], start[key].to(state[key].dtype))] == []
    assert words == "convnet, 14,634 parameters"
    assert len(held) == 10


def test_the_classifier_may_be_new(folders: tuple[Path, Path]) -> None:
    """Of 4 classes, into 10: the usual way to fine-tune."""
    data, file = folders
    torch.manual_seed(1)
    save_model(file, build_model("convnet", 1, (8, 8), 4), {}, None)
    state, _, _, held = alone(trained, data, {"weights": str(file)})
    assert state["fc.weight"].shape == (10, 128)
    assert set(held) == {"fc.weight", "fc.bias"}


def frozen_session(processes: Processes, data: Path, folder: Path, stop: StopAt | None, resume: str | None) -> Session:
    return session(processes, data, folder, stop, freeze="backbone", resume_from_checkpoint=resume)


@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(two_ranks: Ranks, folders: tuple[Path, Path], tmp_path: Path, count: int) -> None:
    def run(*arguments: Any) -> list[Session]:
        return two_ranks.run(frozen_session, folders[0], *arguments) if count == 2 else [alone(frozen_session, folders[0], *arguments)]

    wholes = run(tmp_path / "whole", None, None)
    assert run(tmp_path / "half", StopAt(count - 1, 8), None)[0].interrupted
    for whole, resumed in zip(wholes, run(tmp_path / "half", None, "auto"), strict=True):
        assert_equal(resumed, whole)
        assert {key.partition("/")[2] for key in whole.optimizer} == {"net.fc.weight", "net.fc.bias"}


def examined(processes: Processes, data: Path, folder: Path) -> Report:
    run = make_run(processes, data, batch_size=8, freeze="backbone")
    report = Report()
    with messengers() as own:
        run_checks(subject_of(run, own, (), folder), CHECKS, report)
    run.close()
    return report


def test_the_doctor_finds_nothing_wrong_with_it(two_ranks: Ranks, folders: tuple[Path, Path], tmp_path: Path) -> None:
    for report in two_ranks.run(examined, folders[0], tmp_path):
        assert report.failed == [], report.results
        assert report.results["SyncBN"].measured == "the model has no BatchNorm layer that is trained"
        assert "2 tensors equal on 2 ranks" in report.results["gradients"].measured


def test_train_mode_keeps_all_batchnorm_layers_that_are_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3), nn.Dropout(), nn.Linear(3, 7))
    freeze_backbone("mine:make", model, 7)
    train_mode(model.eval(), "backbone")
    assert [layer.training for layer in model] == [True, False, False, True, True]
    train_mode(model.eval(), "none")
    assert all(layer.training for layer in model.modules())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 7), nn.Linear(7, 5)), "1"),
        (nn.Sequential(nn.Linear(9, 5), nn.Conv2d(5, 7, 1), nn.Conv2d(7, 7, 1), nn.ReLU()), "2"),
        (nn.Sequential(nn.Linear(9, 7), nn.Conv2d(7, 7, 1)), "0"),
        (nn.Linear(9, 7), ""),
        (nn.Sequential(nn.Linear(9, 5), nn.ReLU()), None),
    ],
)
def test_the_classifier_is_the_last_layer_with_an_output_for_each_class(model: nn.Module, name: str | None) -> None:
    assert classifier(model, 7) == name
    if name is None:
        with pytest.raises(UserError, match=r"^--freeze backbone finds no classifier in --model mine:make: .* with 7 outputs; leave"):
            freeze_backbone("mine:make", model, 7)
    else:
        freeze_backbone("mine:make", model, 7)
        trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
        assert trainable == {f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")}
