"""Name -> model, and its BatchNorm layers synchronised over the processes."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models import sync_batchnorm
from trainer.models.convnet import ConvNet
from trainer.runtime import UserError


def build_model(architecture: str, in_channels: int, size: tuple[int, int], num_classes: int) -> nn.Module:
    """A model with fresh weights from torch's default generator.

    Args:
        architecture: 'convnet'.
        in_channels: C of the images.
        size: (height, width) of the images, pixels.
        num_classes: outputs.
    """
    if architecture != "convnet":
        raise UserError(f"--model must be convnet, but is {architecture}")
    return ConvNet(in_channels, size, num_classes)


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def synchronise_batchnorm(model: nn.Module, device: torch.device) -> tuple[nn.Module, int]:
    """The model with synchronised BatchNorm, and the number of converted layers. Before the optimizer is built and before prepare().

    torch's own conversion on CUDA; elsewhere ours, since torch's layer refuses CPU tensors.
    """
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm if device.type == "cuda" else sync_batchnorm.convert
    kind = nn.SyncBatchNorm if device.type == "cuda" else sync_batchnorm.SyncBatchNorm
    converted: nn.Module = convert(model)
    return converted, sum(isinstance(module, kind) for module in converted.modules())
