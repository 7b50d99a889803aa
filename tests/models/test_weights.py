"""Weights from files and by published names: whole, or what stays random is named; anything else is refused by name."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from trainer.config import Config
from trainer.export import contiguous, read_model, save_model
from trainer.models.build import build_model, make_model
from trainer.models.weights import check_weights, load_tensors, load_weights, read
from trainer.runtime import UserError


def convnet(classes: int = 10, channels: int = 1, seed: int = 0) -> nn.Module:
    """A network whose BatchNorm statistics have moved."""
    torch.manual_seed(seed)
    model = build_model("convnet", channels, (8, 8), classes)
    model(torch.rand(16, channels, 8, 8))
    return model


def written(model: nn.Module, kind: str) -> str:
    """The model's weights in a file, whose name is returned."""
    if kind == "model folder":
        save_model(Path("run/model"), model, {}, None)
        return "run/model"
    if kind == "its file":
        save_model(Path("run/model"), model, {}, None)
        return "run/model/model.safetensors"
    if kind == "safetensors":
        save_file(contiguous(model), "some.safetensors")
        return "some.safetensors"
    torch.save(model.state_dict(), f"some.{kind}")
    return f"some.{kind}"


def assert_equal(model: nn.Module, expected: dict[str, Tensor], but: tuple[str, ...] = ()) -> None:
    state = model.state_dict()
    assert {name for name in state if not torch.equal(state[name], expected[name])} == set(but)


@pytest.mark.parametrize("kind", ["model folder", "its file", "safetensors", "pth", "pt"])
def test_all_tensors_come_from_the_file(kind: str) -> None:
    file, model = written(convnet(seed=0), kind), convnet(seed=1)
    check_weights(file, "convnet")
    assert load_weights(file, "convnet", model, 10) == f"from {file}"
    assert_equal(model, convnet(seed=0).state_dict())


@pytest.mark.parametrize("classes", [3, 12])
def test_the_classifier_of_another_number_of_classes_stays_random_and_is_named(classes: int) -> None:
    file, model, fresh = written(convnet(classes, seed=0), "pth"), convnet(seed=1), convnet(seed=1)
    words = load_weights(file, "convnet", model, 10)
    assert words == f"from {file}; fc.weight and fc.bias random, since {classes} classes were trained and these are 10"
    expected = convnet(classes, seed=0).state_dict()
    expected |= {name: fresh.state_dict()[name] for name in ("fc.weight", "fc.bias")}
    assert_equal(model, expected)


def test_colour_weights_are_summed_for_grey_images() -> None:
    file, model = written(convnet(channels=3), "pth"), convnet(seed=1)
    assert load_weights(file, "convnet", model, 10) == f"from {file}; layer1.0.weight summed over colours"
    expected = convnet(channels=3).state_dict()
    expected["layer1.0.weight"] = expected["layer1.0.weight"].sum(1, keepdim=True)
    assert_equal(model, expected)


@pytest.mark.parametrize("name", ["squeezenet1_1", "mnasnet0_5"])
def test_torchvisions_models_through_an_exported_folder(name: str) -> None:
    """MNASNet refuses tensors without the version that safetensors drops; SqueezeNet's classifier is a convolution."""
    config = {"architecture": name, "in_channels": 1, "size": [32, 32], "num_classes": 7}
    torch.manual_seed(0)
    model = build_model(name, 1, (32, 32), 7).eval()
    save_model(Path("model"), model, config, None)
    images = torch.rand(2, 1, 32, 32)
    assert torch.equal(read_model("model")[0](images), model(images))
    other = build_model(name, 1, (32, 32), 5)
    words = load_weights("model", name, other, 5)
    assert words == "from model; classifier.1.weight and classifier.1.bias random, since 7 classes were trained and these are 5"


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[], str]:
    def write() -> str:
        tensors = dict(convnet().state_dict())
        change(tensors)
        torch.save(tensors, "some.pth")
        return "some.pth"

    return write


def holding(content: Any, name: str = "some.pth") -> Callable[[], str]:
    def write() -> str:
        torch.save(content, name)
        return name

    return write


def of_bytes(content: bytes, name: str) -> Callable[[], str]:
    def write() -> str:
        Path(name).write_bytes(content)
        return name

    return write


def empty_folder() -> str:
    Path("folder").mkdir()
    return "folder"


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


WRONG: dict[str, tuple[Callable[[], str], str]] = {
    "nothing": (lambda: "nowhere.pth", "there is no file nowhere.pth: name a model folder, "),
    "a folder without weights": (empty_folder, "there is no file folder/model.safetensors: name a model folder, "),
    "a tensor less": (changed(lambda t: t.pop("layer2.1.running_var")), "does not fit --model convnet: it lacks layer2.1.running_var: "),
    "no classifier": (changed(lambda t: [t.pop("fc.weight"), t.pop("fc.bias")]), "it lacks fc.weight, fc.bias: "),
    "a tensor more": (changed(lambda t: t.update(more=torch.zeros(1))), "it has more, unknown to the model: "),
    "another shape": (
        changed(lambda t: t.update({"layer2.0.weight": torch.zeros(2, 3)})),
        "layer2.0.weight is 2 x 3 instead of 32 x 16 x 5 x 5: ",
    ),
    "a classifier of other features": (
        changed(lambda t: t.update({"fc.weight": torch.zeros(7, 9)})),
        "fc.weight is 7 x 9 instead of 10 x 128",
    ),
    "DDP's names": (
        changed(lambda t: [t.update({f"module.{name}": t.pop(name)}) for name in list(t)]),
        "it lacks layer1.0.weight, layer1.0.bias, layer1.1.weight and 13 more, it has module.fc.bias, ",
    ),
    "another model's": (lambda: written(models.squeezenet1_1(num_classes=7), "pth"), "it lacks layer1.0.weight, "),
    "a whole training": (holding({"model": {}, "optimizer": {}, "epoch": 3}), "is no state dict, it holds model, optimizer, epoch: "),
    "one tensor": (holding(torch.zeros(3)), "is no state dict, it holds a Tensor: "),
    "nothing in it": (holding({}), "is no state dict, it holds : "),
    "a whole model": (lambda: holding(convnet())(), "holds more than tensors, which is not executed: give a state dict"),
    "a hostile pickle": (of_bytes(pickle.dumps(Payload()), "evil.pth"), "holds more than tensors, which is not executed: "),
    "a hostile file of torch": (lambda: holding({"fc.weight": Payload()})(), "holds more than tensors, which is not executed: "),
    "a hostile pickle by another name": (of_bytes(pickle.dumps(Payload()), "evil.safetensors"), "cannot be read ("),
    "an empty file": (of_bytes(b"", "empty.pth"), "cannot be read ("),
    "an empty safetensors file": (of_bytes(b"", "empty.safetensors"), "cannot be read ("),
    "a text": (of_bytes(b"lr: 3\n", "recipe.yaml"), "is no file of torch, or "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_files_are_refused_by_name(kind: str) -> None:
    write, words = WRONG[kind]
    file = write()
    with pytest.raises(UserError) as raised:
        load_weights(file, "convnet", convnet(), 10)
    text = str(raised.value)
    assert text.startswith(f"--weights {file}")
    assert words in text
    assert "\n" not in text
    assert len(text) < 350
    assert not Path("executed").exists()


def test_a_payload_would_show() -> None:
    pickle.loads(pickle.dumps(Payload()))
    assert Path("executed").is_dir()


def test_a_resumed_run_does_not_need_the_file() -> None:
    config = Config(weights="gone.pth")
    assert make_model(config, 1, (8, 8), 10, 2, resumed=True)[1] == "the checkpoint's"
    with pytest.raises(UserError, match=r"no file gone\.pth"):
        make_model(config, 1, (8, 8), 10, 2, resumed=False)


def test_a_published_file_keeps_its_versions() -> None:
    """A file of torch's carries them, and a layer may read an older one; ours only stand in where there is none."""
    model = models.mnasnet0_5(num_classes=7)
    torch.save(model.state_dict(), "some.pth")
    tensors: Any = read("some.pth")
    assert tensors._metadata[""]["version"] == 2
    tensors._metadata[""]["version"] = 3
    with pytest.raises(ValueError, match="version should be set to 1 or 2 instead of 3"):
        load_tensors(build_model("mnasnet0_5", 3, (32, 32), 7), tensors)


# By torchvision's names


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as raised:
        check_weights("IMAGENET21K", "resnet50")
    assert str(raised.value) == (
        "--weights IMAGENET21K: there is no file IMAGENET21K: name a model folder, a .safetensors file, a state dict of torch (.pth), "
        "or one of torchvision's (IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT)"
    )
    for weights in ("IMAGENET1K_V2", "DEFAULT"):
        check_weights(weights, "resnet50")
    with pytest.raises(UserError, match="there is no file DEFAULT"):
        check_weights("DEFAULT", "convnet")


def test_a_download_that_fails_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    # A port that nobody listens on, also on a machine with a network.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with pytest.raises(UserError) as raised:
        load_weights("DEFAULT", "squeezenet1_1", build_model("squeezenet1_1", 1, (32, 32), 7), 7)
    text = str(raised.value)
    assert text.startswith(
        "--weights DEFAULT: https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth cannot be downloaded or read ("
    )
    assert text.endswith(
        f": get that file by other means and give it by --weights FILE, or put it into {tmp_path / 'cache' / 'hub' / 'checkpoints'}"
    )
    assert "Connection refused" in text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("classes", [7, 1000])
def test_a_published_file_in_torchs_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, classes: int) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    theirs = models.squeezenet1_1()
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(theirs.state_dict(), cache / "squeezenet1_1-b8a52dc0.pth")
    ours = build_model("squeezenet1_1", 3, (32, 32), classes)
    words = load_weights("IMAGENET1K_V1", "squeezenet1_1", ours, classes)
    start = "IMAGENET1K_V1 of torchvision; made for pixels of mean 0.485, 0.456, 0.406 and deviation 0.229, 0.224, 0.225"
    head = ("classifier.1.weight", "classifier.1.bias") if classes != 1000 else ()
    assert words == start + (f"; {' and '.join(head)} random, since 1000 classes were trained and these are {classes}" if head else "")
    theirs_state = theirs.state_dict()
    assert_equal(ours, theirs_state | {name: ours.state_dict()[name] for name in head})


def test_a_published_file_that_is_hostile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save({"features.0.weight": Payload()}, cache / "squeezenet1_1-b8a52dc0.pth")
    with pytest.raises(UserError, match=r"squeezenet1_1-b8a52dc0.pth cannot be downloaded or read \("):
        load_weights("DEFAULT", "squeezenet1_1", build_model("squeezenet1_1", 3, (32, 32), 7), 7)
    assert not Path("executed").exists()
