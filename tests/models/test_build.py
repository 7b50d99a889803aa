"""What is done to every model before it is wrapped."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock

from trainer.models.build import keep_strides


def gradients(prepare: Callable[[nn.Module], None]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Of ConvNeXt's block, whose depthwise convolution works on images in channels_last; as DDP sees them."""
    torch.manual_seed(0)
    model = nn.Sequential(CNBlock(8, 1.0, 0.0), nn.Conv2d(8, 4, 1), CNBlock(4, 1.0, 0.0))
    prepare(model)
    seen: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.update({name: gradient}))
    model(torch.rand(2, 8, 4, 4)).square().sum().backward()
    return model, seen


def test_gradients_have_the_strides_of_their_weights() -> None:
    """DDP would warn, and copy (pytorch#47163)."""
    model, kept = gradients(keep_strides)
    _, plain = gradients(lambda model: None)
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    assert {name: gradient.stride() for name, gradient in kept.items()} == strides
    assert plain["2.block.0.weight"].stride() != strides["2.block.0.weight"], "what would have to be kept"
    for name in strides:
        assert torch.equal(kept[name], plain[name]), name
