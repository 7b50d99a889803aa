"""Training on several ranks is the training of one process on the whole batch."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import ids_of, largest_difference, make_run, needed_hooks, tensors, write_ids
from tests.ranks import RankError, Ranks, alone
from trainer.hooks.base import Hook
from trainer.loop import evaluate, fit, train_epoch
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes
from trainer.state import Run

KNOBS: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "lr_scheduler": "cosine",
    "warmup_epochs": 0.5,
    "output_dir": "out",
}


class Losses(Hook):
    """Each update's mean loss over all ranks, and the order of the images."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, run: Run) -> None:
        sums = run.accelerator.reduce(torch.stack([run.window.sum_up(), torch.full_like(run.window.loss, run.window.samples)]), "sum")
        self.values.append(float(sums[0] / sums[1]))
        run.window.clear()


def train(processes: Processes, folder: Path, out: Path, dtype: torch.dtype, knobs: dict[str, Any]) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    try:
        run = make_run(processes, folder, **{**KNOBS, "output_dir": str(out), **knobs})
        initial = tensors(run.module)
        losses = Losses()
        fit(run, needed_hooks(losses))
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "initial": initial,
        "state": tensors(run.module),
        "losses": losses.values,
        "step": run.state.step,
        "samples": run.state.samples,
        "metrics": run.state.metrics,
        "lr": run.optimizer.param_groups[0]["lr"],
        "layers": run.sync_bn_layers,
    }


@pytest.mark.parametrize(
    ("images", "clipping"),
    [(320, None), (339, 0.5)],  # 339 = 10 x 32 + 19: a short last batch of 10 + 9
    ids=["full batches", "short tail, clipped"],
)
def test_float64_two_ranks_equal_one_after_fifty_steps(two_ranks: Ranks, tmp_path: Path, images: int, clipping: float | None) -> None:
    folder = write_ids(tmp_path / "ids", train=images)
    knobs = {"global_batch_size": 32, "epochs": 5, "max_steps": 50, "max_grad_norm": clipping}
    one = alone(train, folder, tmp_path / "one", torch.float64, knobs)
    both = two_ranks.run(train, folder, tmp_path / "two", torch.float64, knobs)
    assert one["step"] == 50
    for rank in both:
        assert rank["layers"] == 2
        assert (rank["step"], rank["samples"]) == (one["step"], one["samples"])
        assert largest_difference(rank["initial"], one["initial"]) == 0
        assert largest_difference(rank["state"], one["state"]) <= 1e-9
    assert largest_difference(both[0]["state"], both[1]["state"]) == 0
    assert largest_difference(one["initial"], one["state"]) > 1e-2, "it did not train"


def test_float32_losses_of_the_first_ten_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=320)
    knobs = {"global_batch_size": 32, "epochs": 1}
    one = alone(train, folder, tmp_path / "one", torch.float32, knobs)
    both = two_ranks.run(train, folder, tmp_path / "two", torch.float32, knobs)
    assert len(one["losses"]) == 10
    assert both[0]["losses"] == both[1]["losses"]
    assert both[0]["losses"] == pytest.approx(one["losses"], abs=1e-4)


def test_without_sync_bn_they_differ(two_ranks: Ranks, tmp_path: Path) -> None:
    """The equality above is SyncBatchNorm's doing."""
    folder = write_ids(tmp_path / "ids", train=320)
    knobs = {"global_batch_size": 32, "epochs": 1}
    one = alone(train, folder, tmp_path / "one", torch.float64, knobs)
    off = two_ranks.run(train, folder, tmp_path / "two", torch.float64, {**knobs, "sync_bn": "off"})
    assert off[0]["layers"] == 0
    assert largest_difference(off[0]["state"], one["state"]) > 1e-4


def without_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def gradient_of_first_update(processes: Processes, folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """A BatchNorm-free model's gradient just before its optimizer step, and each rank's share of it."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        run = make_run(processes, folder, without_batchnorm(), **{**KNOBS, "output_dir": "out", "momentum": 0.0, "lr": 1.0, **knobs})
        run.train_loader.set_epoch(0)
        before = tensors(run.module)
        fit(run, needed_hooks())
        after = tensors(run.module)
    finally:
        torch.set_default_dtype(torch.float32)
    return {"gradient": {name: before[name] - after[name] for name in before}, "samples": run.state.samples}


@pytest.mark.parametrize(("accumulation", "images"), [(1, 32), (2, 64), (2, 40), (3, 47), (4, 21)])
def test_gradient_is_the_mean_over_all_images_of_the_update(two_ranks: Ranks, tmp_path: Path, accumulation: int, images: int) -> None:
    """Also for a short last update: accumulated micro-batches, the last of them unequal over the ranks."""
    folder = write_ids(tmp_path / "ids", train=images)
    plain = {"epochs": 1, "lr_scheduler": "constant", "warmup_epochs": 0, "max_steps": 1}
    both = two_ranks.run(gradient_of_first_update, folder, {**plain, "batch_size": 8, "gradient_accumulation_steps": accumulation})
    one = alone(gradient_of_first_update, folder, {**plain, "batch_size": both[0]["samples"]})
    assert both[0]["samples"] == min(images, 16 * accumulation)
    for rank in both:
        assert largest_difference(rank["gradient"], one["gradient"]) < 1e-12


def accumulated(processes: Processes, folder: Path, out: Path) -> tuple[int, int]:
    run = make_run(processes, folder, batch_size=4, gradient_accumulation_steps=3, epochs=2, output_dir=str(out))
    fit(run, needed_hooks())
    return run.state.step, run.state.samples


def test_evaluation_and_short_tails_do_not_disturb_accumulation(two_ranks: Ranks, tmp_path: Path) -> None:
    """29 images on 2 x 4: micro-batches 8, 8, 8, 5, so updates of 24 and 5 images in each of two epochs."""
    folder = write_ids(tmp_path / "ids", train=29)
    assert two_ranks.run(accumulated, folder, tmp_path / "out") == [(4, 58), (4, 58)]


def seen(processes: Processes, folder: Path) -> list[list[list[int]]]:
    """Ids of each batch of each epoch on this rank."""
    run = make_run(processes, folder, batch_size=8)
    epochs = []
    for epoch in (0, 1):
        run.train_loader.set_epoch(epoch)
        epochs.append([ids_of(images) for images, *_ in run.train_loader])
    return epochs


def test_shards_are_disjoint_complete_and_repeat(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=61)
    first, again = two_ranks.run(seen, folder), two_ranks.run(seen, folder)
    assert first == again
    for epoch in (0, 1):
        zero, one = (list(chain(*rank[epoch])) for rank in first)
        assert not set(zero) & set(one)
        assert sorted(zero + one) == list(range(61))
        assert [len(batch) for batch in first[0][epoch]] == [8, 8, 8, 7]
        assert [len(batch) for batch in first[1][epoch]] == [8, 8, 8, 6]
    assert first[0][0] != first[0][1]
    alone_epochs = alone(seen, folder)
    whole = [sorted(ids) for ids in (chain(*alone_epochs[0][i : i + 2]) for i in range(0, 8, 2))]
    assert [sorted(first[0][0][i] + first[1][0][i]) for i in range(4)] == whole


class Unused(ConvNet):
    """A ConvNet with a layer that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__(1, (8, 8), 10)
        self.spare = nn.Linear(2, 2)


def train_unused(processes: Processes, folder: Path, out: Path, knobs: dict[str, Any]) -> int:
    run = make_run(processes, folder, Unused(), epochs=1, output_dir=str(out), **knobs)
    fit(run, needed_hooks())
    return run.state.step


def test_an_unused_parameter_is_named_with_the_flag(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids")
    with pytest.raises(RankError, match=r"does not depend on spare\.weight, spare\.bias: use --find_unused_parameters"):
        two_ranks.run(train_unused, folder, tmp_path / "out", {})
    assert two_ranks.run(train_unused, folder, tmp_path / "found", {"find_unused_parameters": True}) == [2, 2]


def ddp_options(processes: Processes, folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    model = make_run(processes, folder, **knobs).model
    return {
        name: getattr(model, name) for name in ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")
    }


# The ConvNet's buffers are BatchNorm's.
DDP = {"find_unused_parameters": False, "broadcast_buffers": False, "gradient_as_bucket_view": False, "static_graph": False}


@pytest.mark.parametrize("name", ["", *(name for name in DDP if name != "broadcast_buffers")])
def test_ddp_options_reach_ddp(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = write_ids(tmp_path / "ids", train=8)
    changed = {name: not DDP[name]} if name else {}
    assert two_ranks.run(ddp_options, folder, changed) == [{**DDP, **changed}] * 2


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_ddp_options_do_not_change_the_numbers(two_ranks: Ranks, tmp_path: Path, option: str) -> None:
    folder = write_ids(tmp_path / "ids", train=64)
    knobs = {"batch_size": 8, "epochs": 2}
    plain = two_ranks.run(train, folder, tmp_path / "plain", torch.float64, knobs)[0]
    changed = two_ranks.run(train, folder, tmp_path / "changed", torch.float64, {**knobs, option: True})[0]
    assert largest_difference(changed["state"], plain["state"]) == 0


class Counting(nn.Module):
    """Its forward pass reads a buffer, which each rank moves on by its own amount."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1 + torch.distributed.get_rank()
        logits: Tensor = self.linear(images.flatten(1)) + self.calls
        return logits


def sent_buffers(
    processes: Processes, folder: Path, module: nn.Module, each_time: bool = False
) -> tuple[bool, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Whether DDP sends buffers at each forward pass; the buffers after an epoch's training, all tensors and metrics after its evaluation.

    Args:
        each_time: have it send them.
    """
    run = make_run(processes, folder, module, batch_size=8, sync_bn="off", normalize="none")
    hooks = needed_hooks()
    hooks.on_epoch_start(run)
    sends = bool(run.model.broadcast_buffers)
    if each_time:
        run.late_buffers = False
        run.model.broadcast_buffers = True  # type: ignore[assignment]
    train_epoch(run, hooks)
    before = {name: buffer.clone() for name, buffer in run.module.named_buffers()}
    evaluate(run, hooks)
    return sends, before, tensors(run.module), run.state.metrics


def test_buffers_that_count_in_training_are_sent_at_each_forward_pass(two_ranks: Ranks, tmp_path: Path) -> None:
    ends = two_ranks.run(sent_buffers, write_ids(tmp_path / "ids", train=64), Counting())
    assert [sends for sends, *_ in ends] == [True, True]
    # The last of four forward passes began with rank 0's.
    assert [float(buffers["calls"]) for _, buffers, *_ in ends] == [4.0, 5.0]


def test_batchnorm_statistics_are_sent_before_an_evaluation_as_if_ddp_had_sent_them_each_time(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=64)
    torch.manual_seed(0)
    model = ConvNet(1, (8, 8), 10)
    late, early = two_ranks.run(sent_buffers, folder, model), two_ranks.run(sent_buffers, folder, model, True)
    assert [sends for sends, *_ in late] == [False, False]
    ours, other = (buffers["layer1.1.running_mean"] for _, buffers, *_ in late)
    assert not ours.equal(other), "each rank saw other images"
    for rank in range(2):
        assert largest_difference(late[rank][2], early[0][2]) == 0
        assert late[rank][3] == early[rank][3]


def refused(processes: Processes, folder: Path) -> str:
    from trainer.runtime import UserError

    with pytest.raises(UserError) as raised:
        make_run(processes, folder, sync_bn="off", broadcast_buffers=False)
    return str(raised.value)


def test_statistics_of_each_rank_its_own_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    assert "--broadcast_buffers" in two_ranks.run(refused, write_ids(tmp_path / "ids", train=8))[1]


def different_weights(processes: Processes, folder: Path) -> list[Tensor]:
    torch.manual_seed(processes.rank)
    run = make_run(processes, folder, ConvNet(1, (8, 8), 10))
    return list(tensors(run.module).values())


def test_rank_zeros_initial_weights_rule(two_ranks: Ranks, tmp_path: Path) -> None:
    zero, one = two_ranks.run(different_weights, write_ids(tmp_path / "ids", train=8))
    for left, right in zip(zero, one, strict=True):
        assert torch.equal(left, right)
