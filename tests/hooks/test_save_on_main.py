"""The best epoch's model: one writer, clean keys, equal logits."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import alone_run, make_run, needed_hooks, write_ids
from tests.ranks import Ranks
from trainer.export import read_model
from trainer.loop import fit
from trainer.models.convnet import ConvNet
from trainer.runtime import Processes
from trainer.state import TrainState


def test_the_best_epoch_is_kept_the_earlier_one_on_a_tie() -> None:
    state = TrainState()
    for acc1 in (50.0, 70.0, 70.0, 60.0):
        state.metrics = {"acc1": acc1, "loss": 1 / acc1}
        state.finish_epoch()
    assert state.epoch == 4
    assert state.best == {"acc1": 70.0, "loss": 1 / 70, "epoch": 2}


def trained(processes: Processes, folder: Path, out: Path) -> dict[str, Any]:
    run = make_run(processes, folder, batch_size=8, epochs=1, output_dir=str(out / f"rank{processes.rank}"))
    fit(run, needed_hooks())
    run.model.eval()
    with torch.no_grad():
        logits = run.module(run.normalize(run.data.test.gather(list(range(16)))))
    return {"logits": logits, "pixels": run.data.test.gather(list(range(16)))}


def test_written_by_the_main_process_only_and_loads_into_the_plain_model(two_ranks: Ranks, tmp_path: Path) -> None:
    zero, one = two_ranks.run(trained, write_ids(tmp_path / "ids", train=32), tmp_path / "out")
    assert torch.equal(zero["logits"], one["logits"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank0"]
    folder = tmp_path / "out" / "rank0" / "model"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(folder / "model.safetensors").keys() == ConvNet().state_dict().keys()
    model, config = read_model(folder)
    assert type(model) is ConvNet
    images: Tensor = (zero["pixels"].float() / 255 - torch.tensor(config["mean"]).view(-1, 1, 1)) / torch.tensor(config["std"]).view(
        -1, 1, 1
    )
    with torch.no_grad():
        torch.testing.assert_close(model(images), zero["logits"], rtol=1e-5, atol=1e-5)
    assert config["classes"] == [str(n) for n in range(10)]
    assert config["precision"] == "no"


def test_a_worse_epoch_leaves_the_file_alone(tmp_path: Path) -> None:
    with alone_run(write_ids(tmp_path / "ids", train=32), batch_size=8, epochs=1, output_dir=str(tmp_path / "out")) as run:
        hooks = needed_hooks()
        fit(run, hooks)
        file = tmp_path / "out" / "model" / "model.safetensors"
        before = file.read_bytes()
        with torch.no_grad():
            run.module.get_parameter("fc.weight").zero_()
        run.state.metrics = {**run.state.metrics, "acc1": -1.0}
        run.state.finish_epoch()
        hooks.on_epoch_end(run)
        assert file.read_bytes() == before
        run.state.metrics = {**run.state.metrics, "acc1": 101.0}
        run.state.finish_epoch()
        hooks.on_epoch_end(run)
        assert file.read_bytes() != before
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["epoch"] == 3
    assert not list((tmp_path / "out").glob(".*"))
