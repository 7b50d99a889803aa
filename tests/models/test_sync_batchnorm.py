"""SyncBatchNorm on gloo ranks against plain BatchNorm on the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankError, Ranks
from trainer.models.build import synchronise_batchnorm
from trainer.models.sync_batchnorm import SyncBatchNorm, convert
from trainer.runtime import Processes

SHAPE = (7, 3, 4, 5)
OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}]


def images(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).mul(3).add(50).to(dtype)


def layer(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> nn.BatchNorm2d:
    built = nn.BatchNorm2d(SHAPE[1], **options).to(dtype)
    if built.affine:
        with torch.no_grad():
            built.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            built.bias.copy_(torch.tensor([-1.0, 0.0, 3.0]))
    return built


def two_steps(norm: nn.Module, batches: list[Tensor], upstream: list[Tensor]) -> dict[str, Any]:
    """Outputs and gradients of two training steps, statistics after them, and the output in evaluation mode."""
    outputs, gradients = [], []
    for batch, grad in zip(batches, upstream, strict=True):
        batch = batch.clone().requires_grad_()
        output = norm(batch)
        output.backward(grad)
        outputs.append(output.detach())
        gradients.append(batch.grad)
    norm.eval()
    return {
        "outputs": outputs,
        "gradients": gradients,
        "parameters": [parameter.grad for parameter in norm.parameters()],
        "state": dict(norm.state_dict()),
        "evaluated": norm(batches[0]).detach(),
    }


def on_rank(processes: Processes, sizes: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    start = sum(sizes[: processes.rank])
    mine = slice(start, start + sizes[processes.rank])
    norm, count = synchronise_batchnorm(layer(options, dtype), torch.device("cpu"))
    assert count == 1
    return two_steps(norm, [images(s, dtype)[mine] for s in (0, 1)], [images(s, dtype)[mine] for s in (2, 3)])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(4, 3), (6, 1)], ids=str)
def test_float64_equals_batchnorm_on_the_whole_batch(two_ranks: Ranks, sizes: tuple[int, int], options: dict[str, Any]) -> None:
    check(two_ranks, sizes, options, torch.float64, 1e-11)


def test_three_ranks(three_ranks: Ranks) -> None:
    check(three_ranks, (1, 4, 2), {}, torch.float64, 1e-11)


def test_float32_does_not_cancel(two_ranks: Ranks) -> None:
    """A mean far from zero: sums of squares would lose the variance."""
    check(two_ranks, (4, 3), {}, torch.float32, 2e-4)


def check(ranks: Ranks, sizes: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    results = ranks.run(on_rank, sizes, options, dtype)
    whole = two_steps(layer(options, dtype), [images(s, dtype) for s in (0, 1)], [images(s, dtype) for s in (2, 3)])

    def close(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    for step in (0, 1):
        close(torch.cat([r["outputs"][step] for r in results]), whole["outputs"][step])
        close(torch.cat([r["gradients"][step] for r in results]), whole["gradients"][step])
    for index, gradient in enumerate(whole["parameters"]):
        close(sum(r["parameters"][index] for r in results), gradient)
    if options.get("track_running_stats", True):  # without them torch too uses each rank's own batch
        close(torch.cat([r["evaluated"] for r in results]), whole["evaluated"])
    for result in results:
        assert result["state"].keys() == whole["state"].keys()
        for name, tensor in whole["state"].items():
            assert result["state"][name].dtype == tensor.dtype
            close(result["state"][name], tensor)


def bf16_on_rank(processes: Processes) -> tuple[torch.dtype, Tensor, Tensor]:
    norm = convert(layer({}, torch.float32))
    batch = images(0, torch.float32)[processes.rank * 4 :][:4].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = norm(batch)
    output.float().sum().backward()
    assert batch.grad is not None
    assert batch.grad.dtype == torch.bfloat16
    return output.dtype, output.detach().float(), norm.state_dict()["running_mean"]


def test_bf16_input_keeps_float32_statistics(two_ranks: Ranks) -> None:
    (dtype, _, mean), (_, _, other) = two_ranks.run(bf16_on_rank)
    assert dtype == torch.bfloat16
    assert torch.equal(mean, other)
    expected = images(0, torch.float32).bfloat16().float().mean((0, 2, 3)) * 0.1
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


def one_value_each(processes: Processes) -> None:
    SyncBatchNorm(3)(torch.ones(1, 3, 1, 1))


def refused_when_alone(processes: Processes) -> str:
    import torch.distributed as dist

    group = [dist.new_group([rank]) for rank in range(processes.count)][processes.rank]
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        convert(nn.BatchNorm2d(3), group)(torch.ones(1, 3, 1, 1))
    return str(raised.value)


def test_one_value_for_each_channel_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    assert len(two_ranks.run(refused_when_alone)) == 2
    two_ranks.run(one_value_each)


def test_a_missing_collective_is_not_hidden(two_ranks: Ranks) -> None:
    """The layer really talks to the other rank: in a group of one it does not."""
    with pytest.raises(RankError):
        two_ranks.run(expects_own_mean)


def expects_own_mean(processes: Processes) -> None:
    norm = convert(nn.BatchNorm2d(1, momentum=1.0))
    norm(torch.full((2, 1, 2, 2), float(processes.rank)))
    assert float(norm.state_dict()["running_mean"]) == processes.rank


def test_conversion_keeps_parameters_and_finds_nested_layers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), nn.BatchNorm1d(4))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    converted, count = synchronise_batchnorm(model, torch.device("cpu"))
    assert count == 2
    assert {name: tensor.data_ptr() for name, tensor in converted.state_dict().items()} == before
