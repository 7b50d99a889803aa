"""`--auto_batch_size`: where a batch does not fit into memory, smaller ones and more accumulation; the update stays what it was."""

import gc
from dataclasses import replace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from trainer.accelerator import memory_format
from trainer.config import Config
from trainer.data.loaders import Data
from trainer.data.transforms import Normalize
from trainer.models.build import make_model
from trainer.models.head import freeze_backbone, train_mode
from trainer.optim import build_optimizer
from trainer.runtime import Processes, UserError


def fit_batch(config: Config, processes: Processes, accelerator: Accelerator, data: Data) -> tuple[Config, Data]:
    """The config and data with the largest batch that all ranks can train on; as they are without `auto_batch_size`. A collective.

    Tried are the batch size of the plan and its smaller divisors, each half of the one before or less; accumulation makes up for it, so
    that the images of an update, their order and the learning rate stay the same. (BatchNorm sees the smaller batches.) What one
    rank finds binds all.

    Raises:
        UserError: not even one image fits.
    """
    plan = data.plan
    size = plan.batch_size
    while config.auto_batch_size:
        with processes.together():
            fine = fits(config, accelerator, data, size)
        if all(processes.all_gather(fine)):
            break
        if size == 1:
            raise UserError("--auto_batch_size: not even a batch of one image fits into memory: use a smaller --model", agreed=True)
        size = max(divisor for divisor in range(1, size // 2 + 1) if plan.batch_size % divisor == 0)
    if size == plan.batch_size:
        return config, data
    accumulation = plan.accumulation * plan.batch_size // size
    note = f"batch {plan.batch_size} -> {size} a process, accumulation {plan.accumulation} -> {accumulation}: that fits into memory"
    config = replace(config, batch_size=size, gradient_accumulation_steps=accumulation)
    return config, replace(data, plan=replace(plan, batch_size=size, accumulation=accumulation), fitted=note)


def fits(config: Config, accelerator: Accelerator, data: Data, batch_size: int) -> bool:
    """Whether this rank has the memory for two updates on `batch_size` black images.

    Without the other ranks, whose collectives would wait for one that has run out of memory: a plain model, and the room that DDP's
    buckets take beside it.
    """
    try:
        _train(config, accelerator, data, batch_size)
        return True
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Its frames hold what has just been allocated.
        error.__traceback__ = None
        return False
    finally:
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


def _train(config: Config, accelerator: Accelerator, data: Data, batch_size: int) -> None:
    channels, height, width = data.train.shape
    classes, device = len(data.classes), accelerator.device
    module: nn.Module = make_model(config, channels, (height, width), classes, batch_size, resumed=True)[0]
    if config.freeze == "backbone":
        freeze_backbone(config.model, module, classes)
    layout = memory_format(config, accelerator)
    module = module.to(device).to(memory_format=layout)
    normalize = Normalize(data.mean, data.std, layout).to(device)
    optimizer = build_optimizer(config, module)
    buckets = [torch.zeros_like(parameter) for parameter in module.parameters() if parameter.requires_grad]
    train_mode(module, config.freeze)
    for _ in range(2):
        images = torch.zeros(batch_size, channels, height, width, dtype=torch.uint8, device=device)
        with accelerator.autocast():
            logits = module(normalize(images))
        F.cross_entropy(logits.float(), torch.zeros(batch_size, dtype=torch.int64, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    del buckets


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has an exception of its own; on a CPU it is a RuntimeError whose text says so."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
