"""Models of one's own: found from the current folder, called with what they take, and every mistake one sentence."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import write_ids
from tests.ranks import Ranks
from trainer.config import Config
from trainer.export import read_model
from trainer.main import main
from trainer.models.build import build_model, check_model, try_images
from trainer.runtime import UserError

HEAD = "import torch\nfrom torch import nn\n"
# Each takes 1 x 8 x 6 images.
RIGHT = {
    "all three": "def make(in_channels, size, num_classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * size[0] * size[1], num_classes))\n",
    "keywords only": "def make(*, num_classes, image_size):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(image_size[0] * image_size[1], num_classes))\n",
    "classes only": "def make(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n",
    "with defaults of its own": "def make(width=4, num_classes=1000):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.Linear(width, num_classes))\n",
    "any keywords": "def make(**options):\n"
    "    assert set(options) == {'in_channels', 'size', 'num_classes'}\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(48, options['num_classes']))\n",
    "a class": "class make(nn.Module):\n"
    "    def __init__(self, num_classes):\n"
    "        super().__init__()\n"
    "        self.fc = nn.Linear(48, num_classes)\n"
    "    def forward(self, x):\n"
    "        return self.fc(x.flatten(1))\n",
}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def module(text: str) -> str:
    """A module in the current folder, with a name that no other test has imported."""
    name = f"mine_{time.monotonic_ns()}"
    Path(f"{name}.py").write_text(HEAD + text)
    return name


@pytest.mark.parametrize("kind", RIGHT)
def test_a_factory_gets_what_it_takes(kind: str) -> None:
    name = f"{module(RIGHT[kind])}:make"
    check_model(Config(model=name), resumed=False)
    model = build_model(name, 1, (8, 6), 7)
    try_images(name, model, 1, (8, 6), 7)
    assert model(torch.zeros(3, 1, 8, 6)).shape == (3, 7)


def test_a_module_in_a_package() -> None:
    package = Path(f"package_{time.monotonic_ns()}")
    package.mkdir()
    (package / "nets.py").write_text(HEAD + RIGHT["all three"])
    assert build_model(f"{package}.nets:make", 1, (8, 6), 7)(torch.zeros(3, 1, 8, 6)).shape == (3, 7)


def test_the_current_folder_hides_no_installed_package() -> None:
    Path("torchvision.py").write_text("raise RuntimeError('hidden')\n")
    build_model(f"{module(RIGHT['all three'])}:make", 1, (8, 6), 7)
    assert build_model("squeezenet1_1", 1, (28, 28), 7)(torch.zeros(1, 1, 28, 28)).shape == (1, 7)
    assert sys.path[-1] == str(Path.cwd())


WRONG: dict[str, tuple[str, str]] = {
    # The module's text, and what the sentence says after the model's name.
    "does not compile": (
        "def make(:\n",
        r": the module mine_\d+ cannot be imported \(SyntaxError: invalid syntax \(mine_\d+.py, line 3\)\): ",
    ),
    "fails on import": (
        "1 / 0\n",
        r": the module mine_\d+ cannot be imported \(ZeroDivisionError: division by zero in \S+/mine_\d+.py, line 3\): ",
    ),
    "ends Python": ("raise SystemExit(3)\n", r": the module mine_\d+ cannot be imported \(SystemExit: 3 in "),
    "another name": ("def made(num_classes): ...\n", r": mine_\d+ has no make: did you mean made\?"),
    "nothing like it": ("", r": mine_\d+ has no make: name a function or class of it"),
    "no function": ("make = 3\n", r": make is a int: name a function or class"),
    "needs more": (
        "def make(depth, num_classes, width): ...\n",
        r" needs depth, width: it is called with in_channels, size \(or image_size\)",
    ),
    "by place only": ("def make(num_classes, /): ...\n", r" needs num_classes: it is called with in_channels, size \(or image_size\)"),
    "fails": (
        "def make(num_classes):\n    return nn.Linear(num_classes, 'two')\n",
        r" fails \(TypeError: .* in \S+, line \d+\): correct it",
    ),
    "returns nothing": ("def make(num_classes): ...\n", r" returns a NoneType: let it return a torch.nn.Module"),
    "returns a class": ("def make(num_classes):\n    return nn.Linear\n", r" returns a type: let it return a torch.nn.Module"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_factory_is_one_sentence(kind: str) -> None:
    text, words = WRONG[kind]
    with pytest.raises(UserError, match=rf"^--model mine_\d+:make{words}") as raised:
        build_model(f"{module(text)}:make", 1, (8, 6), 7)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a:", ":a", "a.b.:c", "a:b.c", "a:b:c", "a b:c", "1:2", "a/b.py:c"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UserError, match=r"must be package\.module:factory"):
        build_model(name, 1, (8, 6), 7)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^--model nowhere.nets:make: the module nowhere.nets cannot be imported \(ModuleNotFoundError: "):
        check_model(Config(model="nowhere.nets:make"), resumed=False)


# Tried on the images


class Listed(nn.Linear):
    def forward(self, x: Any) -> Any:
        return [super().forward(x.flatten(1))]


def frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 7)).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Listed(48, 7), r"returns a list: let it return the logits, a tensor \(B, 7\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 1000)), "returns 2 x 1000 numbers for 2 images, not 2 x 7: let it take num_classes"),
        (nn.Linear(6, 7), "returns 2 x 1 x 8 x 7 numbers for 2 images"),
        (nn.Sequential(nn.Flatten(), nn.Linear(47, 7)), r"cannot take images of 1 x 8 x 6 \(mat1 and mat2 shapes"),
        (frozen(), "has no parameter that takes a gradient: there is nothing to train"),
    ],
)
def test_a_model_that_cannot_be_trained(model: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=f"^--model mine:make {words}") as raised:
        try_images("mine:make", model, 1, (8, 6), 7)
    assert "\n" not in str(raised.value)


def test_trying_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(72, 7))
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    # A model that draws in evaluation too.
    model.register_forward_hook(lambda *_: torch.rand(2, 7))
    try_images("mine:make", model, 1, (8, 6), 7, smallest_batch=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [layer.training for layer in model] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1]._forward_pre_hooks


def test_a_batch_of_one_where_batchnorm_sees_one_value() -> None:
    """torch would end the training in the middle of an epoch: Expected more than 1 value per channel."""
    model = nn.Sequential(nn.Conv2d(1, 3, (8, 6)), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 7))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, 1, 8, 6))
    try_images("mine:make", model, 1, (8, 6), 7, smallest_batch=2)
    with pytest.raises(UserError, match="normalises over the batch alone, and each epoch has a batch of one image: choose another"):
        try_images("mine:make", model, 1, (8, 6), 7, smallest_batch=1)


# From end to end

NET = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self, num_classes, in_channels=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))
"""
)


def command(folder: Path, argv: list[str]) -> None:
    import os

    os.chdir(folder)
    main(argv)


def test_trained_resumed_and_loaded_on_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own_nets.py").write_text(NET)
    flags = ["--dataset", str(write_ids(tmp_path / "ids")), "--model", "own_nets:Net", "--output_dir", "out", "--batch_size", "8"]
    two_ranks.run_apart(command, tmp_path, [*flags, "--epochs", "1"])
    two_ranks.run_apart(command, tmp_path, [*flags, "--epochs", "2", "--resume", "auto"])
    log = (tmp_path / "out" / "train.log").read_text()
    assert "sync_bn on (1 layers)" in log
    assert "model own_nets:Net, 98 parameters\n" in log
    assert "weights random\n" in log
    assert "weights the checkpoint's\n" in log
    with pytest.raises(UserError, match=r"^the model folder \S+ is of own_nets:Net, which is code, and a folder alone has none run: "):
        read_model(tmp_path / "out" / "model")
    assert "own_nets" not in sys.modules
    model, config = read_model(tmp_path / "out" / "model", factory="own_nets:Net")
    assert (type(model).__name__, model.training, config["architecture"]) == ("Net", False, "own_nets:Net")
    assert int(model.state_dict()["body.1.num_batches_tracked"]) in (6, 12)
