"""The range test: its pairs of rate and loss against a plain loop, where it ends, what it suggests, and the command's files."""

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import ROOT, make_run, write_ids
from tests.ranks import Ranks, alone
from trainer import find_lr, main
from trainer.data.sampler import EpochSampler
from trainer.lr_finder import HIGHEST, LOWEST, UPDATES, Sweep, flag_of, picture, sweep
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes
from trainer.seeding import derive_seed
from trainer.state import Run
from trainer.stops import Interrupted

KNOBS: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0, "max_grad_norm": 1.0, "cpu_threads": 1}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 93, 8)


def swept(processes: Processes, folder: Path, knobs: dict[str, Any]) -> tuple[Sweep, list[tuple[float, float]]]:
    """In float64; and, on one process, what a plain loop measures."""
    torch.set_default_dtype(torch.float64)
    try:
        run = make_run(processes, folder, **KNOBS, **knobs)
        return sweep(run), plain_loop(run) if processes.count == 1 else []
    finally:
        torch.set_default_dtype(torch.float32)


def plain_loop(run: Run) -> list[tuple[float, float]]:
    torch.manual_seed(derive_seed(0, "init"))
    model = ConvNet(1, (8, 8), 10).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    (mean,), (std,), data, pairs = run.data.mean, run.data.std, run.data.train, list[tuple[float, float]]()
    sampler = EpochSampler(len(data), 0)
    while len(pairs) < 100:
        order = sampler.order()
        for start in range(0, len(data), 16):
            images, labels = data.__getitems__(order[start : start + 16])[:2]
            loss = F.cross_entropy(model((images.double() / 255 - mean) / std), labels)
            rate = 1e-7 * 10 ** (8 * len(pairs) / 99)
            pairs.append((rate, loss.item()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        sampler.set_epoch(sampler.epoch + 1)
    return pairs


def test_pairs_are_those_of_a_plain_loop_on_one_process_and_on_two(two_ranks: Ranks, ids: Path) -> None:
    one, expected = alone(swept, ids, {"batch_size": 16})
    assert len(one.rates) > 40
    for number, (rate, loss) in enumerate(zip(one.rates, one.losses, strict=True)):
        assert (rate, loss) == pytest.approx(expected[number], rel=1e-9)
    (zero, _), (other, _) = two_ranks.run(swept, ids, {"global_batch_size": 16})
    assert zero == other
    assert zero.rates == one.rates
    assert zero.losses == pytest.approx(one.losses, rel=1e-6)
    assert zero.ended == one.ended


def test_smoothing_and_the_end_by_hand(ids: Path) -> None:
    found, _ = alone(swept, ids, {"batch_size": 16})
    average = 0.0
    for number, loss in enumerate(found.losses):
        average = 0.98 * average + 0.02 * loss
        assert found.smoothed[number] == pytest.approx(average / (1 - 0.98 ** (number + 1)), rel=1e-12)
    far = [number for number, loss in enumerate(found.smoothed) if loss > 4 * min(found.smoothed[: number + 1])]
    assert far in ([], [len(found.smoothed) - 1])
    assert (found.ended == "the highest rate was reached") == (len(found.rates) == UPDATES and not far)
    assert found.rates[0] == LOWEST
    assert LOWEST * (HIGHEST / LOWEST) ** ((len(found.rates) - 1) / 99) == found.rates[-1]


class Explodes(nn.Module):
    """A loss of 1 that turns into `loss` when the model has been called `after` times."""

    def __init__(self, loss: float, after: int, rank: int | None = None) -> None:
        super().__init__()
        self.net, self.loss, self.after, self.rank, self.calls = nn.Linear(64, 10), loss, after, rank, 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        own = self.rank is None or self.rank == int(torch.distributed.get_rank())
        logits: Tensor = self.net(images.flatten(1)) * 1e-9
        return logits * self.loss if own and self.calls > self.after else logits


def exploded(processes: Processes, folder: Path, module: Explodes, knobs: dict[str, Any]) -> tuple[int, bool, str, float | None]:
    found = sweep(make_run(processes, folder, module, **KNOBS, **knobs))
    return len(found.rates), all(map(math.isfinite, found.losses)), found.ended, found.suggestion


def test_a_loss_that_is_not_finite_on_one_rank_ends_both(two_ranks: Ranks, ids: Path) -> None:
    zero, one = two_ranks.run(exploded, ids, Explodes(math.nan, 20, rank=1), {"gradient_accumulation_steps": 2, "batch_size": 4})
    assert zero == one
    assert zero[:3] == (10, True, "the loss was not finite any more")


def test_a_loss_that_grows_ends_it(ids: Path) -> None:
    length, finite, ended, _ = alone(exploded, ids, Explodes(1e14, 30), {"batch_size": 8})
    assert (length, finite, ended) == (31, True, "the smoothed loss was above 4 times its lowest")


def test_the_suggestion_is_where_the_loss_falls_most_steeply() -> None:
    rates = [LOWEST * (HIGHEST / LOWEST) ** (number / 99) for number in range(100)]

    def suggested(smoothed: list[float]) -> float | None:
        return Sweep(rates[: len(smoothed)], smoothed, smoothed, "").suggestion

    assert suggested([1 / (1 + math.exp((number - 60) / 5)) for number in range(100)]) == pytest.approx(rates[60])
    assert suggested([3.0 if number < 5 else 2 - number / 1000 for number in range(100)]) not in rates[:10], "the first ones are not judged"
    assert suggested([1 + number / 10 for number in range(100)]) is None
    assert suggested([1.0] * 100) is None
    assert suggested([3.0, 2.0, 1.0]) is None


def frozen_statistics(processes: Processes, folder: Path) -> tuple[bool, bool]:
    """Whether the sweep has left BatchNorm's statistics alone, and the backbone's weights."""
    run = make_run(processes, folder, **KNOBS, freeze="backbone")
    before = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    sweep(run)
    after = run.module.state_dict()
    same = {name: torch.equal(tensor, after[name]) for name, tensor in before.items()}
    return all(same[name] for name in same if "running" in name), all(same[name] for name in same if name.startswith("layer"))


def test_a_frozen_backbone_stays_frozen(ids: Path) -> None:
    assert alone(frozen_statistics, ids) == (True, True)


def asked_to_stop(processes: Processes, folder: Path) -> str:
    run = make_run(processes, folder, **KNOBS)
    if processes.rank == 1:
        processes.stops.request("SIGTERM")
    with pytest.raises(Interrupted) as stopped:
        sweep(run)
    return str(stopped.value)


def test_a_stop_asked_of_one_rank_ends_both(two_ranks: Ranks, ids: Path) -> None:
    assert two_ranks.run(asked_to_stop, ids) == ["SIGTERM", "SIGTERM"]


def rate_of_flag(processes: Processes, folder: Path) -> tuple[float, float]:
    run = make_run(processes, folder, lr=0.3, scale_lr="linear", batch_size=8)
    return flag_of(run, 0.5), run.lr_plan.peak


def test_the_flag_leads_to_the_rate(two_ranks: Ranks, ids: Path) -> None:
    assert two_ranks.run(rate_of_flag, ids) == [(0.25, 0.6)] * 2


def command(folder: Path, flags: list[str], entry: Callable[[list[str]], None] = find_lr.main) -> tuple[int, str, str]:
    """Code, stdout, stderr."""
    os.chdir(folder)
    code, out, err = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            entry(flags)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def test_the_command_leaves_two_files_and_a_training_can_follow(two_ranks: Ranks, ids: Path, tmp_path: Path) -> None:
    flags = ["--dataset", str(ids), "--batch_size", "8", "--output_dir", "out", "--lr", "0.01"]
    (code, shown, errors), other = two_ranks.run_apart(command, tmp_path, flags)
    assert (code, errors) == (0, "")
    assert other == (0, "", "")
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} - {"logs"} == {"lr_finder.json", "lr_finder.svg"}
    found = json.loads((out / "lr_finder.json").read_text())
    assert len(found["rates"]) == len(found["losses"]) == len(found["smoothed"]) > 40
    assert found["suggestion"] == found["suggested_lr"]
    assert found["global_batch_size"] == 16
    texts = ["".join(text.itertext()).strip() for text in ElementTree.parse(out / "lr_finder.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"learning rate", "each update", "smoothed", f"steepest fall: {found['suggestion']:.2g}"} <= set(texts)
    said = shown.splitlines()[-1]
    assert said.startswith("find_lr after ")
    assert " processes 2, backend gloo" in shown
    assert f"suggested: --lr {found['suggested_lr']:.2g} (" in said
    assert said.endswith("; lr_finder.json and lr_finder.svg in out")
    before = (out / "lr_finder.json").read_bytes()
    trained = two_ranks.run_apart(command, tmp_path, [*flags, "--max_steps", "1"], main.main)
    assert [(code, errors) for code, _, errors in trained] == [(0, ""), (0, "")]
    assert json.loads((out / "results.json").read_text())["step"] == 1
    # Beside the run that is there now, the same comes out again.
    (out / "lr_finder.json").unlink()
    run = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert two_ranks.run_apart(command, tmp_path, flags)[0][0] == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == run | {out / "lr_finder.json": before}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--resume", "auto"], "error: --resume_from_checkpoint is not for find_lr, which begins with new weights: leave it out"),
        (["--local_sgd_steps", "4"], "error: --local_sgd_steps is not for find_lr, which looks at one loss of all processes: leave it out"),
        (["--output_dir", "/proc/nowhere"], "error: --output_dir /proc/nowhere cannot be made or written ("),
    ],
)
def test_mistakes(two_ranks: Ranks, ids: Path, tmp_path: Path, flags: list[str], sentence: str) -> None:
    (code, shown, errors), other = two_ranks.run_apart(command, tmp_path, ["--dataset", str(ids), "--output_dir", "out", *flags])
    assert (code, shown) == (2, "")
    assert other == (2, "", "")
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_starts_as_a_script_from_anywhere(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "trainer" / "find_lr.py"), "--help"]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "--global_batch_size" in shown


def test_a_picture_of_a_sweep_that_ended_at_once() -> None:
    for length in (2, 30):
        rates = [LOWEST * (HIGHEST / LOWEST) ** (number / 99) for number in range(length)]
        ElementTree.fromstring(picture(Sweep(rates, [1.0] * length, [1.0] * length, "")))
