"""The ConvNet is the tutorials', layer by layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.build import batchnorm_layers, build_model
from trainer.models.convnet import ConvNet

SHAPES = {
    "layer1.0.weight": (16, 1, 5, 5),
    "layer1.0.bias": (16,),
    "layer1.1.weight": (16,),
    "layer1.1.bias": (16,),
    "layer2.0.weight": (32, 16, 5, 5),
    "layer2.0.bias": (32,),
    "layer2.1.weight": (32,),
    "layer2.1.bias": (32,),
    "fc.weight": (10, 1568),
    "fc.bias": (10,),
}


def test_parameters_for_mnist() -> None:
    model = ConvNet()
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == SHAPES
    assert sum(parameter.numel() for parameter in model.parameters()) == 29_034
    assert len(batchnorm_layers(model)) == 2


def test_layers_are_the_tutorials() -> None:
    model = ConvNet()
    for block, channels in ((model.layer1, (1, 16)), (model.layer2, (16, 32))):
        convolution, norm, relu, pool = block
        assert isinstance(convolution, nn.Conv2d)
        assert (convolution.in_channels, convolution.out_channels) == channels
        assert (convolution.kernel_size, convolution.stride, convolution.padding) == ((5, 5), (1, 1), (2, 2))
        assert isinstance(norm, nn.BatchNorm2d)
        assert (norm.eps, norm.momentum, norm.affine, norm.track_running_stats) == (1e-5, 0.1, True, True)
        assert isinstance(relu, nn.ReLU)
        assert isinstance(pool, nn.MaxPool2d)
        assert (pool.kernel_size, pool.stride, pool.padding) == (2, 2, 0)


@pytest.mark.parametrize("training", [True, False])
def test_forward_is_written_out(training: bool) -> None:
    torch.manual_seed(0)
    model = ConvNet().double().train(training)
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = images
    for name, shape in (("layer1", (4, 16, 14, 14)), ("layer2", (4, 32, 7, 7))):
        x = F.conv2d(x, state[f"{name}.0.weight"], state[f"{name}.0.bias"], padding=2)
        mean, variance = (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))
        if not training:
            mean, variance = state[f"{name}.1.running_mean"], state[f"{name}.1.running_var"]
        x = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-5).sqrt()
        x = x * state[f"{name}.1.weight"].view(-1, 1, 1) + state[f"{name}.1.bias"].view(-1, 1, 1)
        x = F.max_pool2d(x.relu(), 2)
        assert x.shape == shape
    torch.testing.assert_close(model(images), x.flatten(1) @ state["fc.weight"].T + state["fc.bias"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("channels", "size", "classes", "features"),
    [(1, (28, 28), 10, 1568), (3, (32, 32), 100, 2048), (3, (33, 47), 7, 32 * 8 * 11), (1, (4, 4), 2, 32), (1, (5, 30), 3, 32 * 7)],
)
def test_other_images_and_classes(channels: int, size: tuple[int, int], classes: int, features: int) -> None:
    model = build_model("convnet", channels, size, classes)
    assert isinstance(model, ConvNet)
    assert (model.fc.in_features, model.fc.out_features) == (features, classes)
    assert model(torch.rand(2, channels, *size)).shape == (2, classes)


def test_fresh_weights_come_from_torchs_generator() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(build_model("convnet", 1, (28, 28), 10).state_dict()["layer1.0.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
