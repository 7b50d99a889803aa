"""The exported model: loads strictly into the plain network, is replaced as a whole, and says what is wrong when it is broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer import export
from trainer.export import read_model, save_model
from trainer.files import write_json
from trainer.models.convnet import ConvNet
from trainer.runtime import UserError

CONFIG: dict[str, Any] = {
    "architecture": "convnet",
    "in_channels": 1,
    "size": [8, 8],
    "num_classes": 10,
    "classes": ["é"] * 10,
    "acc1": 97.5,
}
SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


def trained(seed: int = 0) -> ConvNet:
    """A network whose BatchNorm statistics have moved."""
    torch.manual_seed(seed)
    model = ConvNet(1, (8, 8), 10)
    model(torch.rand(16, 1, 8, 8))
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(torch.linspace(0, 1, 5 * 64).view(5, 1, 8, 8))
    return output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", trained(), CONFIG, SCALER)
    return tmp_path / "model"


def test_equal_logits_after_loading(folder: Path) -> None:
    model, config = read_model(folder)
    assert type(model) is ConvNet
    assert not model.training
    assert config == CONFIG
    assert torch.equal(logits(model), logits(trained()))
    plain = ConvNet(1, (8, 8), 10)
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    assert plain.state_dict()["layer1.1.num_batches_tracked"] == 1
    assert read_model(str(folder))[1] == CONFIG


def test_files_are_numbers_and_text(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "scaler.json"]
    assert json.loads((folder / "scaler.json").read_text()) == SCALER
    assert "é" in (folder / "config.json").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


def test_the_state_of_a_real_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    save_model(tmp_path / "model", trained(), CONFIG, scaler.state_dict())
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(json.loads((tmp_path / "model" / "scaler.json").read_text()))
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 1024.0


def test_a_second_save_replaces_the_whole_folder(folder: Path) -> None:
    save_model(folder, trained(1), {**CONFIG, "acc1": 98.0}, None)
    model, config = read_model(folder)
    assert torch.equal(logits(model), logits(trained(1)))
    assert not torch.equal(logits(model), logits(trained(0)))
    assert config["acc1"] == 98.0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"], "the old scaler stayed"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["write_tensors", "write_json"])
def test_a_save_that_fails_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, name, full)
        with pytest.raises(OSError, match="No space left"):
            save_model(folder, trained(1), CONFIG, SCALER)
    assert torch.equal(logits(read_model(folder)[0]), logits(trained(0)))
    save_model(folder, trained(2), CONFIG, SCALER)
    assert torch.equal(logits(read_model(folder)[0]), logits(trained(2)))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


def test_what_a_killed_save_left_does_not_disturb(folder: Path) -> None:
    for leftover in (".model.tmp", ".model.old"):
        (folder.parent / leftover / "deep").mkdir(parents=True)
        (folder.parent / leftover / "model.safetensors").write_bytes(b"half")
    assert read_model(folder)[1] == CONFIG
    save_model(folder, trained(1), CONFIG, SCALER)
    assert torch.equal(logits(read_model(folder)[0]), logits(trained(1)))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


def test_channels_last_weights(tmp_path: Path) -> None:
    model = trained().to(memory_format=torch.channels_last)
    weight = model.get_parameter("layer2.0.weight")
    assert not weight.is_contiguous()
    save_model(tmp_path / "model", model, CONFIG, None)
    assert not weight.is_contiguous(), "saving changed the model"
    assert torch.equal(logits(read_model(tmp_path / "model")[0]), logits(trained()))


def test_tied_weights_and_views(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("view", torch.arange(12.0).view(3, 4).T)
    save_model(tmp_path / "model", model, {}, None)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def edit(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", {**CONFIG, **changes})


def rename_a_key(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BREAKS: dict[str, Callable[[Path], Any]] = {
    "gone": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "truncated weights": lambda folder: cut(folder / "model.safetensors"),
    "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "truncated config": lambda folder: cut(folder / "config.json"),
    "config of another kind": lambda folder: (folder / "config.json").write_text("[1]"),
    "config without size": lambda folder: write_json(folder / "config.json", {"architecture": "convnet"}),
    "other size": lambda folder: edit(folder, size=[28, 28]),
    "other number of classes": lambda folder: edit(folder, num_classes=7),
    "other keys": rename_a_key,
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_folder_is_refused_by_name(folder: Path, kind: str) -> None:
    BREAKS[kind](folder)
    with pytest.raises(UserError) as raised:
        read_model(folder)
    assert str(raised.value).startswith(f"the model folder {folder} cannot be loaded: ")
    assert "\n" not in str(raised.value)


def test_another_architecture_is_refused(folder: Path) -> None:
    edit(folder, architecture="squeezenet1_1")
    with pytest.raises(UserError, match=r"cannot be loaded: it lacks features\.0\.weight, .* and \d+ more, it has fc\.bias, ") as raised:
        read_model(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_alone_runs_no_code(folder: Path) -> None:
    """Its config.json could name any function of any package."""
    edit(folder, architecture="os:mkdir")
    with pytest.raises(UserError, match=f"^the model folder {folder} is of os:mkdir, which is code, and a folder alone has none run: name"):
        read_model(folder)
    with pytest.raises(UserError, match=f"^the model folder {folder} is of os:mkdir, "):
        read_model(folder, factory="own:make")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    write_json(path, {"name": "é", "numbers": [1, 2.5, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "é", "numbers": [1, 2.5, None]}
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {"name": object()})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["some.json"]
