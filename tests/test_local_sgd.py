"""--local_sgd_steps on two real processes: what a few lines of plain PyTorch make of the same batches, and to the bit after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import ids_of, largest_difference, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, assert_equal, session
from trainer.accelerator import build_accelerator
from trainer.comm_hooks import describe_communication
from trainer.config import Config
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes, UserError

KNOBS: dict[str, Any] = {"batch_size": 8, "lr_scheduler": "constant", "warmup_epochs": 0.0, "sync_bn": "off", "cpu_threads": 1, "epochs": 2}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 6 updates an epoch: an averaging after 4, and at the end.
    return write_ids(tmp_path_factory.mktemp("ids"), 96, 16)


def train(processes: Processes, ids: Path, out: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        run = make_run(processes, ids, **KNOBS, output_dir=str(out), **knobs)
        initial, batches = tensors(run.module), []
        augment = run.augment

        def record(images: Tensor, keys: Tensor) -> Tensor:
            batches.append((run.normalize(images).clone(), torch.tensor([number % 10 for number in ids_of(images)])))
            return augment(images, keys)

        run.augment = record  # type: ignore[assignment]
        fit(run, needed_hooks())
    finally:
        torch.set_default_dtype(torch.float32)
    averages = {name: average.clone() for name, average in run.ema.averages.items()} if run.ema is not None else {}
    return {"initial": initial, "batches": batches, "end": tensors(run.module), "averages": averages}


def plain(initial: dict[str, Tensor], batches: list[list[tuple[Tensor, Tensor]]], every: int, epoch: int, lr: float) -> dict[str, Tensor]:
    """Two models with AdamW, each on its own batches; weights, buffers and moments averaged after each `every`-th update and each epoch."""
    torch.set_default_dtype(torch.float64)
    try:
        models = [ConvNet(1, (8, 8), 10), ConvNet(1, (8, 8), 10)]
        for model in models:
            model.load_state_dict(initial)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1) for model in models]
        for update, both in enumerate(zip(*batches, strict=True), start=1):
            for model, optimizer, (images, labels) in zip(models, optimizers, both, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            if update % every == 0 or update % epoch == 0:
                kept = [
                    [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
                    for model, optimizer in zip(models, optimizers, strict=True)
                ]
                for one, other in zip(*kept, strict=True):
                    if one.is_floating_point():
                        mean = (one + other) / 2
                        one.copy_(mean)
                        other.copy_(mean)
        return tensors(models[0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_fourth_update_equals_plain_pytorch(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    knobs = {"local_sgd_steps": 4, "lr": 0.01, "weight_decay": 0.1, "ema_decay": 0.9}
    ranks = two_ranks.run(train, ids, tmp_path / "run", knobs)
    assert len(ranks[0]["batches"]) == 12
    expected = plain(ranks[0]["initial"], [rank["batches"] for rank in ranks], 4, 6, 0.01)
    assert largest_difference(ranks[0]["end"], expected) < 1e-8, (
        "Adam divides rounding by rounding where a gradient is 0: biases before BatchNorm"
    )
    for name in ("end", "averages"):
        assert largest_difference(ranks[0][name], ranks[1][name]) == 0
    never = plain(ranks[0]["initial"], [rank["batches"] for rank in ranks], 6, 6, 0.01)
    assert largest_difference(ranks[0]["end"], never) > 1e-3


def test_each_update_with_sgd_equals_ddp(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    """The mean of weights after one step is the step by the mean gradient; momentum is as linear."""
    knobs = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    local = two_ranks.run(train, ids, tmp_path / "local", knobs | {"local_sgd_steps": 1})
    ddp = two_ranks.run(train, ids, tmp_path / "ddp", knobs)
    for name, weight in local[0]["end"].items():
        if "running" not in name:
            torch.testing.assert_close(weight, ddp[0]["end"][name], rtol=1e-10, atol=1e-12)


def go(processes: Processes, ids: Path, folder: Path, stop: tuple[int, int] | None, knobs: dict[str, Any]) -> Session:
    return session(processes, ids, folder, StopAt(*stop) if stop else None, local_sgd_steps=4, **knobs)


def test_a_stop_waits_for_the_averaging_and_the_resume_is_exact(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    whole = two_ranks.run(go, ids, tmp_path / "whole", None, {"checkpointing_steps": 8})
    first = two_ranks.run(go, ids, tmp_path / "parts", (1, 2), {"checkpointing_steps": 8})
    assert {(rank.state["step"], rank.interrupted) for rank in first} == {(4, "SIGTERM")}
    again = {"checkpointing_steps": 8, "resume_from_checkpoint": "auto"}
    for mine, theirs in zip(two_ranks.run(go, ids, tmp_path / "parts", None, again), whole, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"checkpointing_steps": 6}, "--checkpointing_steps 6 must be a multiple of --local_sgd_steps 4"),
        ({"comm_hook": "fp16"}, "--comm_hook fp16 is about gradients that --local_sgd_steps 4 does not send"),
        ({"static_graph": True}, "--static_graph is about gradients"),
        ({"find_unused_parameters": True}, "--find_unused_parameters is about gradients"),
    ],
)
def test_contradictions(knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Config(local_sgd_steps=4, **knobs)


def test_fp16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(processes: Processes) -> None:
        build_accelerator(Config(local_sgd_steps=4, mixed_precision="fp16"), processes)

    monkeypatch.setenv("TRAINER_FP16_ON_CPU", "1")
    with pytest.raises(UserError, match="--local_sgd_steps cannot go with fp16"):
        alone(build)


def test_what_the_block_says() -> None:
    says = describe_communication(Config(local_sgd_steps=4, sync_bn="on"), 2)
    assert says is not None
    assert says.startswith("local SGD: weights, statistics and optimizer states are averaged every 4 updates; SyncBatchNorm")
    assert describe_communication(Config(local_sgd_steps=4), 1) == "--local_sgd_steps 4 has no effect on one process"
