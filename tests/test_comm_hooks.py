"""--comm_hook on two real processes: each hook's gradient to the number, what is refused, and resumes to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import largest_difference, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from tests.sessions import Session, StopAt, assert_equal, session
from trainer import comm_hooks
from trainer.accelerator import build_accelerator
from trainer.comm_hooks import PowerSgd, describe_communication
from trainer.config import Config
from trainer.hooks.log import describe
from trainer.loop import fit
from trainer.runtime import Processes, UserError
from trainer.shared_gather import memory_for
from trainer.state import Run

# A convolution's matrix has the columns that memory has: with the channels last in another order.
KNOBS: dict[str, Any] = {"batch_size": 8, "optimizer": "sgd", "cpu_threads": 1, "channels_last": "off"}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 64, 16)


def gradients(processes: Processes, ids: Path, hook: str) -> dict[str, Any]:
    """Each parameter's gradient of four backward passes: this rank's own, and what the hook makes of both ranks'."""
    run = make_run(processes, ids, comm_hook=hook, sync_bn="off", powersgd_start=2, **KNOBS)
    run.model.eval()
    passes, first = [], starts(run.power_sgd, run.module)
    for number in range(4):
        images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(10 * number + processes.rank))
        both = []
        for model in (run.module, run.model):
            run.module.zero_grad()
            model(images).square().mean().backward()
            both.append({name: parameter.grad.clone() for name, parameter in run.module.named_parameters() if parameter.grad is not None})
        passes.append(both)
    rows = dict(describe(run))
    return {"passes": passes, "row": rows.get("comm"), "starts": first}


def starts(power_sgd: PowerSgd | None, module: torch.nn.Module) -> dict[str, Tensor]:
    """The factors that PowerSGD begins with."""
    if power_sgd is None:
        return {}
    return {name: power_sgd.factor(weight)[:, 0] for name, weight in module.named_parameters() if power_sgd.shape(weight) is not None}


def plain_mean(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch says of its hooks: cast, divided by the number of ranks, summed."""
    return (one.to(dtype).div_(2) + other.to(dtype).div_(2)).float()


@pytest.mark.parametrize(("hook", "dtype"), [("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_are_the_mean_of_the_rounded_ones(two_ranks: Ranks, ids: Path, hook: str, dtype: torch.dtype) -> None:
    one, other = two_ranks.run(gradients, ids, hook)
    through_memory = "small gradients, up to 256 KB, through shared memory"
    assert one["row"] == (through_memory if hook == "none" else f"{hook}: gradients are rounded to it, and summed in it")
    for (own, mean), (others, means) in zip(one["passes"], other["passes"], strict=True):
        for name in own:
            assert torch.equal(mean[name], means[name])
            assert torch.equal(mean[name], plain_mean(own[name], others[name], dtype)), name
            assert not torch.equal(own[name], others[name]) or not own[name].any()


def wide() -> nn.Module:
    """Whose gradients are in two buckets, the first of them, which DDP closes at 1 MiB, too large for the memory."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 4000), nn.ReLU(), nn.Linear(4000, 10))


def three_updates(processes: Processes, ids: Path, large: bool, shared: bool) -> tuple[dict[str, Tensor], list[bool]]:
    """The weights after three updates, and of each bucket whether it went through the memory."""
    found: list[bool] = []

    def noted(tensor: Tensor, group: Any = None) -> Any:
        memory = memory_for(tensor, group) if shared else None
        found.append(memory is not None)
        return memory

    setattr(comm_hooks, "memory_for", noted)  # noqa: B010
    try:
        torch.manual_seed(0)
        run = make_run(processes, ids, wide() if large else None, max_steps=3, **KNOBS)
        assert run.shared_gradients == shared
        del found[:]
        fit(run, needed_hooks())
        return tensors(run.module), found
    finally:
        setattr(comm_hooks, "memory_for", memory_for)  # noqa: B010


@pytest.mark.parametrize("large", [False, True])
def test_the_memory_brings_what_ddp_would(two_ranks: Ranks, three_ranks: Ranks, ids: Path, large: bool) -> None:
    for ranks, count in ((two_ranks, 2), (three_ranks, 3)):
        through = ranks.run(three_updates, ids, large, True)
        plain = ranks.run(three_updates, ids, large, False)
        assert set(through[0][1]) == ({False, True} if large else {True})
        assert plain[0][1] == [], "DDP's own has no hook"
        for rank in range(count):
            for name, tensor in through[rank][0].items():
                assert torch.equal(tensor, through[0][0][name])
                # Three numbers have a sum for each order of adding them.
                torch.testing.assert_close(tensor, plain[rank][0][name], rtol=0 if count == 2 else 1e-5, atol=0 if count == 2 else 1e-6)


def thin(matrices: list[Tensor], factor: Tensor) -> tuple[list[Tensor], Tensor]:
    """One step of PowerSGD, rank 1, on each rank's matrix: what each one leaves out, and the product; `factor` becomes the new one."""
    factor /= factor.norm()
    column = sum(matrix @ factor for matrix in matrices)
    assert isinstance(column, Tensor)
    column = column / column.norm()
    factor.copy_(sum(matrix.T @ column for matrix in matrices) / len(matrices))
    product = torch.outer(column, factor)
    return [matrix - product for matrix in matrices], product


def test_powersgd_is_the_papers(two_ranks: Ranks, ids: Path) -> None:
    """Two whole gradients, then two products of thin matrices, the second with what the first left out."""
    ranks = two_ranks.run(gradients, ids, "powersgd")
    assert ranks[0]["row"] == "powersgd, rank 1, after 2 updates with whole gradients"
    assert len(ranks[0]["starts"]) >= 2, "nothing is compressed"
    for name in ranks[0]["passes"][0][0]:
        left: list[Tensor] = [torch.zeros(())] * 2
        factor = ranks[0]["starts"].get(name)
        for number in range(4):
            own = [rank["passes"][number][0][name] for rank in ranks]
            made = [rank["passes"][number][1][name] for rank in ranks]
            assert torch.equal(*made)
            expected = (own[0] + own[1]) / 2
            if number >= 2 and factor is not None:
                matrices = [
                    (gradient + rest.view_as(gradient) if rest.ndim else gradient).flatten(1)
                    for gradient, rest in zip(own, left, strict=True)
                ]
                left, product = thin(matrices, factor)
                assert (product.view_as(expected) - expected).norm() > 1e-3 * expected.norm(), "it should not be exact"
                expected = product.view_as(expected)
            torch.testing.assert_close(made[0], expected, rtol=2e-4, atol=1e-7)


def train(processes: Processes, ids: Path, folder: Path, stop: tuple[int, int] | None, knobs: dict[str, Any]) -> Session:
    return session(processes, ids, folder, StopAt(*stop) if stop else None, **knobs)


@pytest.mark.parametrize("stop", [1, 3, 6], ids=["before it starts", "when it starts", "in it"])
def test_powersgd_resumes_to_the_bit(two_ranks: Ranks, ids: Path, tmp_path: Path, stop: int) -> None:
    knobs = {"comm_hook": "powersgd", "powersgd_start": 4, "powersgd_rank": 2}
    whole = two_ranks.run(train, ids, tmp_path / "whole", None, knobs)
    two_ranks.run(train, ids, tmp_path / "parts", (1, stop), knobs)
    parts = two_ranks.run(train, ids, tmp_path / "parts", None, knobs | {"resume_from_checkpoint": "auto"})
    assert parts[0].notes
    for mine, theirs in zip(parts, whole, strict=True):
        assert_equal(mine, theirs)
    plain = two_ranks.run(train, ids, tmp_path / "plain", None, {})
    assert any(not torch.equal(plain[0].weights[name], whole[0].weights[name]) for name in plain[0].weights), "it compresses nothing"


class Wide(nn.Sequential):
    """5 MB of weights: DDP makes several buckets of them, and other ones after the first backward pass."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))


def several_buckets(processes: Processes, ids: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Weights after six updates, and after four, a checkpoint and two in a wrapper made anew; the largest number of buckets."""

    def build() -> Run:
        torch.manual_seed(0)
        return make_run(processes, ids, Wide(), comm_hook="powersgd", powersgd_start=2, **KNOBS)

    def train(run: Run, first: int, last: int) -> None:
        for number in range(first, last):
            images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(10 * number + processes.rank))
            run.module.zero_grad()
            run.model(images).square().mean().backward()
            with torch.no_grad():
                for parameter in run.module.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)

    whole, part, again = build(), build(), build()
    buckets = [0]
    compress = PowerSgd.compress

    def count(self: PowerSgd, *arguments: Any) -> None:
        buckets[0] += 1
        compress(self, *arguments)

    PowerSgd.compress = count  # type: ignore[assignment, method-assign]
    assert whole.power_sgd is not None
    assert part.power_sgd is not None
    assert again.power_sgd is not None
    train(whole, 0, 6)
    PowerSgd.compress = compress  # type: ignore[method-assign]
    train(part, 0, 4)
    again.module.load_state_dict(part.module.state_dict())
    again.power_sgd.load([part.power_sgd.state()], 4)
    train(again, 4, 6)
    return tensors(whole.module), tensors(again.module), buckets[0] // 4


def test_powersgd_of_several_buckets_resumes_to_the_bit(two_ranks: Ranks, ids: Path) -> None:
    for whole, again, buckets in two_ranks.run(several_buckets, ids):
        assert buckets >= 2
        assert largest_difference(again, whole) == 0


def overflow(processes: Processes, ids: Path, folder: Path) -> str:
    try:
        session(processes, ids, folder, comm_hook="fp16", lr=1e4, optimizer="sgd", momentum=0.0, weight_decay=0.0, warmup_epochs=0.0)
    except UserError as error:
        return str(error)
    return "no error"


def test_an_overflow_in_fp16_is_named(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    """At a rate at which gradients pass 65,504, or the loss itself becomes infinite."""
    sentences = two_ranks.run(overflow, ids, tmp_path / "run")
    assert sentences[0] == sentences[1]
    assert " is not finite in update " in sentences[0]


def test_powersgd_with_a_scaler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(processes: Any, **knobs: Any) -> str:
        with pytest.raises(UserError) as error:
            build_accelerator(Config(**knobs), processes)
        return str(error.value)

    monkeypatch.setenv("TRAINER_FP16_ON_CPU", "1")
    assert alone(refused, comm_hook="powersgd", mixed_precision="fp16").startswith("--comm_hook powersgd keeps what it leaves out")


def test_one_process_is_told_that_it_has_no_effect() -> None:
    assert describe_communication(Config(comm_hook="bf16"), 1) == "--comm_hook bf16 has no effect on one process"
