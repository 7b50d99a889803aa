"""torchvision's models on grey and colour images, with any number of classes; and never where they were not asked for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from tests.helpers import ROOT, write_ids
from trainer.models import zoo
from trainer.models.build import build_model, try_images
from trainer.models.head import classifier
from trainer.models.weights import load_weights
from trainer.runtime import UserError

CLASSES = 7
# The side of the images, and the classifier's name.
SAMPLE = {
    "resnet18": (28, "fc"),
    "mobilenet_v3_small": (28, "classifier.3"),
    "mnasnet0_5": (28, "classifier.1"),
    "efficientnet_b0": (28, "classifier.1"),
    "vit_b_16": (32, "heads.head"),
    "squeezenet1_1": (28, "classifier.1"),
    "googlenet": (28, "fc"),
    "inception_v3": (75, "fc"),
    "densenet121": (32, "classifier"),
    "swin_t": (28, "head"),
    "regnet_y_400mf": (28, "fc"),
    "maxvit_t": (224, "classifier.5"),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", SAMPLE)
def test_shapes_and_classifiers(name: str, channels: int) -> None:
    side, head = SAMPLE[name]
    # RegNet computes its widths with tensors that must have values.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = build_model(name, channels, (side, side), CLASSES)
        for training in (True, False):
            logits = model.train(training)(torch.zeros(2, channels, side, side))
            assert isinstance(logits, Tensor), "auxiliary outputs"
            assert logits.shape == (2, CLASSES)
    assert classifier(model, CLASSES) == head
    first = zoo.first_convolution(model)
    assert first is not None
    assert first.in_channels == first.weight.shape[1] == channels


def test_the_sample_is_of_what_there_is() -> None:
    assert set(SAMPLE) < set(zoo.names("any"))
    assert len(zoo.names("any")) >= 80
    assert not [name for name in zoo.names("any") if "rcnn" in name or "deeplab" in name or "raft" in name]


def test_a_colour_model_is_torchvisions_own() -> None:
    torch.manual_seed(0)
    ours = build_model("squeezenet1_1", 3, (28, 28), CLASSES).state_dict()
    torch.manual_seed(0)
    theirs = models.squeezenet1_1(num_classes=CLASSES).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def pair(name: str) -> tuple[Any, Any]:
    """The colour and the grey model of one seed, in evaluation mode and float64."""
    both = []
    torch.set_default_dtype(torch.float64)
    try:
        for channels in (3, 1):
            torch.manual_seed(0)
            both.append(build_model(name, channels, (32, 32), CLASSES).eval())
    finally:
        torch.set_default_dtype(torch.float32)
    return both[0], both[1]


@pytest.mark.parametrize("name", ["squeezenet1_1", "shufflenet_v2_x0_5"])
def test_a_grey_model_does_what_the_colour_model_does_with_grey_in_all_channels(name: str) -> None:
    colour, grey = pair(name)
    images = torch.rand(3, 1, 32, 32, dtype=torch.float64)
    logits = grey(images)
    assert float(logits.detach().std()) > 0
    torch.testing.assert_close(logits, colour(images.expand(-1, 3, -1, -1)), rtol=1e-12, atol=1e-12)


def test_where_the_colour_model_rescales_its_input_so_do_the_grey_weights() -> None:
    colour, grey = pair("googlenet")
    images = torch.rand(3, 1, 32, 32, dtype=torch.float64)
    three = images.expand(-1, 3, -1, -1)
    # Without the shift of the rescaling, whose place is the mean that is subtracted.
    rescaled = colour._transform_input(three) - colour._transform_input(torch.zeros_like(three))
    torch.testing.assert_close(grey.conv1.conv(images), colour.conv1.conv(rescaled), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("alexnet", (1, 28, 28), "--model alexnet cannot take images of 1 x 28 x 28 ("),
        ("vgg11", (3, 28, 28), "--model vgg11 cannot take images of 3 x 28 x 28 ("),
        ("inception_v3", (3, 74, 74), "--model inception_v3 cannot take images of 3 x 74 x 74 ("),
        ("vit_b_16", (1, 28, 28), "--model vit_b_16 cannot take images of 1 x 28 x 28 ("),
        ("vit_b_16", (1, 32, 48), "--model vit_b_16 takes square images, and these are 32 x 48: "),
        ("maxvit_t", (3, 64, 64), "--model maxvit_t cannot take images of 3 x 64 x 64 ("),
        ("resnet18", (4, 32, 32), "--model resnet18 takes grey or colour images, and these have 4 channels: "),
    ],
)
def test_images_that_do_not_fit(name: str, shape: tuple[int, int, int], words: str) -> None:
    channels, *size = shape
    with pytest.raises(UserError) as raised:
        try_images(name, build_model(name, channels, (size[0], size[1]), CLASSES), channels, (size[0], size[1]), CLASSES)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", "did you mean resnet18, "),
        ("ResNet18", "did you mean resnet18?"),
        ("convnex", "convnet"),
        ("fasterrcnn_resnet50_fpn", "there is no such model"),
        ("zzz", "give convnet, a classification model of torchvision, or package.module:factory"),
    ],
)
def test_an_unknown_name_is_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^--model {name}: there is no such model: ") as raised:
        build_model(name, 1, (28, 28), 10)
    assert words in str(raised.value)


def test_a_torchvision_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match=r"^--model resnet18 needs torchvision, which cannot be imported \(.*\): install "):
        build_model("resnet18", 1, (28, 28), 10)
    assert build_model("convnet", 1, (28, 28), 10)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_the_convnet_never_imports_torchvision(tmp_path: Path) -> None:
    flags = ["--dataset", str(write_ids(tmp_path / "ids", 16, 8)), "--max_steps", "1", "--freeze", "backbone"]
    code = (
        "import sys\n"
        "from trainer.main import main\n"
        f"main({[*flags, '--output_dir', str(tmp_path / 'out')]})\n"
        f"main({[*flags, '--output_dir', str(tmp_path / 'again'), '--weights', str(tmp_path / 'out' / 'model')]})\n"
        "assert 'torch' in sys.modules\n"
        "assert 'torchvision' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"weights from {tmp_path / 'out' / 'model'}\n" in done.stdout


# Files as they are published


def saved(module: nn.Module, rename: Any = lambda name: name) -> str:
    """A state dict of torch's as `published.pth`."""
    torch.save({rename(name): tensor for name, tensor in module.state_dict().items()}, "published.pth")
    return "published.pth"


def assert_loaded(module: nn.Module, source: nn.Module) -> None:
    expected = source.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_auxiliary_classifiers_are_left_out() -> None:
    theirs = models.googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False)
    assert any(name.startswith("aux2.") for name in theirs.state_dict())
    ours = build_model("googlenet", 3, (32, 32), CLASSES)
    assert load_weights(saved(theirs), "googlenet", ours, CLASSES) == "from published.pth"
    assert_loaded(ours, theirs)


def test_densenets_names_of_2017() -> None:
    theirs = models.densenet121(num_classes=CLASSES)

    def dotted(name: str) -> str:
        for kind in ("norm1", "conv1", "norm2", "conv2"):
            name = name.replace(f".{kind}.", f".{kind[:-1]}.{kind[-1]}.") if "denselayer" in name else name
        return name

    assert dotted("features.denseblock1.denselayer1.norm1.weight") == "features.denseblock1.denselayer1.norm.1.weight"
    ours = build_model("densenet121", 3, (32, 32), CLASSES)
    load_weights(saved(theirs, dotted), "densenet121", ours, CLASSES)
    assert_loaded(ours, theirs)


def transformer(side: int) -> VisionTransformer:
    return VisionTransformer(image_size=side, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=CLASSES)


def test_positions_are_interpolated_for_another_size() -> None:
    theirs, ours = transformer(64), transformer(32)
    words = load_weights(saved(theirs), "vit_b_16", ours, CLASSES)
    assert words == "from published.pth; positions interpolated for images of 32 x 32"
    expected = interpolate_embeddings(32, 8, theirs.state_dict())
    assert expected["encoder.pos_embedding"].shape == (1, 17, 8)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())
