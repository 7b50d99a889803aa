"""Mixed precision with real arithmetic: fp16 with its GradScaler on two gloo ranks, bf16, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import alone_run, make_run, needed_hooks, tensors, write_ids
from tests.ranks import Ranks, alone
from trainer.accelerator import FP16_ON_CPU, build_accelerator, check_precision, describe_precision
from trainer.config import Config
from trainer.hooks.base import Hook
from trainer.hooks.log import Log
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes, UserError
from trainer.state import Run

FP16 = {FP16_ON_CPU: "1"}
KNOBS: dict[str, Any] = {"mixed_precision": "fp16", "batch_size": 2, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "epochs": 1}


class Overflow(Hook):
    """Records each update; `at` names the forward passes whose loss is made infinite in the backward pass, on rank 1 only."""

    def __init__(self, rank: int, at: tuple[int, ...]) -> None:
        self.rank, self.at, self.passes = rank, at, 0
        self.updates: list[dict[str, Any]] = []

    def on_fit_start(self, run: Run) -> None:
        run.module.register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        self.passes += 1
        if self.rank == 1 and self.passes - 1 in self.at:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    def on_step_end(self, run: Run) -> None:
        self.updates.append(
            {
                "step": run.state.step,
                "skipped": run.state.skipped,
                "scale": run.state.loss_scale,
                "lr": run.optimizer.param_groups[0]["lr"],
                "norm": float(run.window.grad_norm) if run.window.grad_norm is not None else None,
                "samples": run.state.samples,
            }
        )


def overflowing(processes: Processes, folder: Path, out: Path, at: tuple[int, ...], fused: bool, knobs: dict[str, Any]) -> dict[str, Any]:
    run = make_run(processes, folder, **{**KNOBS, "output_dir": str(out), "lr_scheduler": "linear", "warmup_epochs": 0, **knobs})
    if run.accelerator.scaler is not None:
        # PyTorch's first scale, 65536, overflows by itself on batches as small as these.
        run.accelerator.scaler.load_state_dict({**run.accelerator.scaler.state_dict(), "scale": 256.0})
        run.state.loss_scale = 256.0
    if fused:
        for group in run.optimizer.param_groups:
            group["fused"] = True
        run.optimizer.optimizer._step_supports_amp_scaling = True
    weights = [tensors(run.module)]
    watcher = Overflow(processes.rank, at)
    fit(run, needed_hooks(watcher))
    weights.append(tensors(run.module))
    return {
        "updates": watcher.updates,
        "weights": weights,
        "skipped": run.state.skipped,
        "scaler": run.accelerator.scaler.state_dict() if run.accelerator.scaler is not None else None,
        "plan": [run.lr_plan.at(step) for step in range(run.total_steps)],
        "describe": describe_precision(run.accelerator),
        "samples": run.state.samples,
    }


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(two_ranks: Ranks, tmp_path: Path, fused: bool) -> None:
    folder = write_ids(tmp_path / "ids", train=16, test=2)
    zero, one = two_ranks.run(overflowing, folder, tmp_path / "out", (1,), fused, {}, environment=FP16)
    assert zero["describe"] == "fp16 (autocast float16, GradScaler on)"
    for rank in (zero, one):
        # Four passes, the second one skipped: three updates, and the schedule takes its first three rates.
        assert [update["step"] for update in rank["updates"]] == [1, 2, 3]
        assert [update["skipped"] for update in rank["updates"]] == [0, 1, 1]
        assert [update["scale"] for update in rank["updates"]] == [256, 128, 128]
        assert [update["lr"] for update in rank["updates"]] == rank["plan"][:3]
        assert [update["samples"] for update in rank["updates"]] == [4, 8, 12]
        assert rank["scaler"]["scale"] == 128
        assert rank["scaler"]["_growth_tracker"] == 2
    assert all(torch.equal(zero["weights"][1][name], one["weights"][1][name]) for name in zero["weights"][1])
    assert all(torch.isfinite(tensor).all() for tensor in zero["weights"][1].values() if tensor.is_floating_point())


def test_a_skipped_update_leaves_the_weights_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    for rank in two_ranks.run(overflowing, folder, tmp_path / "out", (0,), False, {}, environment=FP16):
        before, after = rank["weights"]
        assert rank["updates"] == []
        assert rank["skipped"] == 1
        for name in before:
            if "running" not in name and "tracked" not in name:
                assert torch.equal(before[name], after[name]), name


def test_gradients_are_unscaled_before_clipping(two_ranks: Ranks, tmp_path: Path) -> None:
    """The norm is the true one, not 256 times it, and the clipped update moves the weights by lr x max_grad_norm."""
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    knobs = {"max_grad_norm": 0.01, "lr": 1.0, "lr_scheduler": "constant"}
    halves = two_ranks.run(overflowing, folder, tmp_path / "half", (), False, knobs, environment=FP16)
    full = two_ranks.run(overflowing, folder, tmp_path / "full", (), False, {**knobs, "mixed_precision": "no"})
    for rank in halves:
        assert rank["updates"][0]["norm"] == pytest.approx(full[0]["updates"][0]["norm"], rel=0.02)
        before, after = rank["weights"]
        moved = sum(float((after[n] - before[n]).double().square().sum()) for n in before if "running" not in n and "tracked" not in n)
        assert moved**0.5 == pytest.approx(0.01, rel=1e-3)
    assert halves[0]["updates"][0]["norm"] == halves[1]["updates"][0]["norm"]


def logged(processes: Processes, folder: Path, out: Path) -> tuple[float, int]:
    out.mkdir(exist_ok=True)
    run = make_run(processes, folder, **{**KNOBS, "output_dir": str(out), "log_interval": 1})
    fit(run, needed_hooks(Log()))
    return float(run.accelerator.scaler.get_scale()), run.state.skipped


def test_the_scale_is_in_the_log_line_and_beside_the_model(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=24, test=2)
    (scale, skipped), other = two_ranks.run(logged, folder, tmp_path / "out", environment=FP16)
    assert (scale, skipped) == other
    assert scale == 65536 / 2**skipped
    line = [line for line in (tmp_path / "out" / "train.log").read_text().splitlines() if line.startswith("train")][-1]
    assert f" scale {scale:g} " in line
    assert (f" skipped {skipped} " in line) == (skipped > 0)
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-2])["scale"] == scale
    assert json.loads((tmp_path / "out" / "model" / "scaler.json").read_text())["scale"] == scale
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["precision"] == "fp16"


class SeenDtypes(ConvNet):
    """A ConvNet that notes the dtype of what its layers hand on."""

    def __init__(self) -> None:
        super().__init__(1, (8, 8), 10)
        self.seen: list[torch.dtype] = []

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        self.seen.append(logits.dtype)
        return logits


@pytest.mark.parametrize(
    ("precision", "dtype", "text"),
    [
        ("no", torch.float32, "no (no autocast, no GradScaler)"),
        ("bf16", torch.bfloat16, "bf16 (autocast bfloat16, no GradScaler)"),
        ("fp16", torch.float16, "fp16 (autocast float16, GradScaler on)"),
    ],
)
def test_the_printed_precision_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype, text: str
) -> None:
    monkeypatch.setenv(FP16_ON_CPU, "1")
    folder = write_ids(tmp_path / "ids", train=4, test=2)
    model = SeenDtypes()
    with alone_run(folder, module=model, mixed_precision=precision, batch_size=4, epochs=1, output_dir=str(tmp_path / "out")) as run:
        assert describe_precision(run.accelerator) == text
        logits = run.model(run.normalize(run.data.train.gather([0, 1])))
        assert logits.dtype == torch.float32, "losses are computed in float32"
    assert model.seen == [dtype]


@pytest.mark.parametrize(
    ("launcher", "flag", "effective"),
    [(None, None, "no"), ("bf16", None, "bf16"), ("bf16", "no", "no"), (None, "bf16", "bf16"), ("no", "bf16", "bf16")],
)
def test_flag_beats_launcher_beats_no(monkeypatch: pytest.MonkeyPatch, launcher: str | None, flag: Any, effective: str) -> None:
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert alone(effective_precision, flag) == effective


def effective_precision(processes: Processes, flag: Any) -> str:
    return str(describe_precision(build_accelerator(Config(mixed_precision=flag), processes)).split()[0])


@pytest.mark.parametrize(
    ("precision", "words"),
    [("fp16", ["fp16 needs a GPU", "bf16 or no", FP16_ON_CPU]), ("fp8", ["fp8 cannot run here, since this run is on the CPU", "bf16"])],
)
def test_what_cannot_run_on_a_cpu_is_refused(precision: str, words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        check_precision(precision, torch.device("cpu"))
    assert all(word in str(raised.value) for word in words)


def test_fp8_on_cuda_is_refused_with_its_own_reason() -> None:
    with pytest.raises(UserError, match="divisible by 16"):
        check_precision("fp8", torch.device("cuda"))


def build(processes: Processes, config: Config) -> None:
    build_accelerator(config, processes)


def test_tf32_is_refused_without_cuda() -> None:
    with pytest.raises(UserError, match="--tf32 needs a CUDA GPU"):
        alone(build, Config(tf32=True))


def test_an_unknown_precision_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp12")
    with pytest.raises(UserError, match="the launcher says 'fp12'"):
        alone(build, Config())


def test_the_launchers_accumulation_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(UserError, match="4 gradient accumulation steps"):
        alone(build, Config())
    alone(build, Config(gradient_accumulation_steps=4))


def threads(processes: Processes, config: Config) -> int:
    before = torch.get_num_threads()
    try:
        build_accelerator(config, processes)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_threads_are_the_cores_shared_by_the_processes(two_ranks: Ranks) -> None:
    cores = len(os.sched_getaffinity(0))
    assert alone(threads, Config()) == cores
    assert two_ranks.run(threads, Config()) == [max(1, cores // 2)] * 2
    assert alone(threads, Config(cpu_threads=3)) == 3
