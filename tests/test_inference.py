"""`from trainer import load_model`: the plain module and its preprocessing, which are those of the training's evaluation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import trainer
from tests.helpers import ROOT, png
from tests.photos import COLOURS, photo
from trainer import Classifier, load_model
from trainer.data.decode import decode
from trainer.inference import Preprocess
from trainer.models.convnet import ConvNet
from trainer.runtime import UserError


def test_two_lines(photos_run: Path) -> None:
    model, preprocess = load_model(photos_run / "model")
    assert type(model) is ConvNet
    assert not model.training
    assert preprocess.classes == tuple(COLOURS)
    image = photo("grass", 3)
    assert model(preprocess(image)).argmax(1).tolist() == [1]
    # Of a run's folder the same.
    assert torch.equal(load_model(str(photos_run))[0](preprocess(image)), model(preprocess(image)))


def test_the_preprocessing_is_the_trainings(photos_run: Path, tmp_path: Path) -> None:
    """A path, its content, an image; one or several; to the bit what the loader and `Normalize` make of them."""
    config = json.loads((photos_run / "model" / "config.json").read_text())
    _, preprocess = load_model(photos_run)
    images = [photo("rust", index, (30 + index, 20)) for index in range(3)]
    images[1] = images[1].convert("CMYK")
    files = []
    for index, image in enumerate(images):
        files.append(tmp_path / f"{index}.{'tif' if image.mode == 'CMYK' else 'png'}")
        image.save(files[-1])
    pixels = torch.stack([decode("", 0, {"bytes": file.read_bytes(), "path": None}, "RGB", (16, 16), resize=True) for file in files])
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    expected = (pixels.float() / 255 - mean) / std
    assert torch.equal(preprocess(files), expected)
    assert torch.equal(preprocess([file.read_bytes() for file in files]), expected)
    assert torch.equal(preprocess([Image.open(file) for file in files]), expected)
    assert torch.equal(preprocess(str(files[0])), expected[:1])


def test_what_cannot_be_read_is_named(photos_run: Path, tmp_path: Path) -> None:
    _, preprocess = load_model(photos_run)
    whole = png(photo("rust", 0))
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    for name, reason in (("half.png", "truncated"), ("gone.png", "No such file")):
        with pytest.raises(UserError, match=rf"^{name} cannot be read \(.*{reason}.*\): replace or remove it$"):
            preprocess(name)
    with pytest.raises(UserError, match=r"^the image cannot be read \(it is no image of a known kind\)"):
        preprocess(b"x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mean": None}, "config.json lacks 'mean'"),
        ({"classes": ["a", "b"]}, "config.json names 2 classes, and the model has 3"),
    ],
)
def test_a_config_that_is_not_whole(photos_run: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    config = json.loads((photos_run / "model" / "config.json").read_text()) | change
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    (tmp_path / "model" / "model.safetensors").symlink_to(photos_run / "model" / "model.safetensors")
    with pytest.raises(UserError, match=f"^the model folder model cannot be used: {reason}: name another run's$"):
        load_model("model")


def test_from_pretrained_of_a_local_folder(photos_run: Path, tmp_path: Path) -> None:
    """huggingface_hub's own mixin reads the folder; its plain keys fit a class of one's own too."""
    from huggingface_hub import PyTorchModelHubMixin

    class Net(ConvNet, PyTorchModelHubMixin):
        pass

    folder, image = photos_run / "model", photo("blue sky", 5)
    plain, preprocess = load_model(folder)
    expected = plain(preprocess(image))
    model = Classifier.from_pretrained(str(folder))
    assert isinstance(model, nn.Module)
    assert not model.training
    assert torch.equal(model(model.preprocess(image)), expected)
    assert torch.equal(Net.from_pretrained(folder)(preprocess(image)), expected)
    model.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    again = Classifier.from_pretrained(tmp_path / "copy")
    assert torch.equal(again(again.preprocess(image)), expected)


def test_the_package_is_light() -> None:
    """A mistyped flag is answered before torch is there; and a public name that there is not is an AttributeError."""
    code = "import sys, trainer; print('torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False False\n"
    with pytest.raises(AttributeError, match="'trainer' has no attribute 'load_modle'"):
        _ = trainer.load_modle
    assert isinstance(trainer.inference.Preprocess, type)
    assert Preprocess is trainer.inference.Preprocess
