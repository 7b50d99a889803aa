"""A training's state copied, and put back after each check, so that it can go on as if it had not been inspected."""

import copy
import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn

PARTS = ("base_dataloader", "batch_sampler", "sampler")


class Snapshot:
    """Weights, buffers, gradients, modes, optimizer, GradScaler, random generators, and the loaders' and samplers' positions.

    Not: what the callables of a script change besides, for example counters of its own, and a learning-rate schedule.
    """

    def __init__(self, model: nn.Module | None, optimizer: Any, scaler: Any, accelerator: Any, loaders: tuple[Any, ...]) -> None:
        modules = list(model.modules()) if model is not None else []
        tensors = [*model.parameters(), *model.buffers()] if model is not None else []
        self.modes = [(module, module.training) for module in modules]
        self.tensors = [(tensor, tensor.detach().clone(), tensor.grad, _clone(tensor.grad)) for tensor in tensors]
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.optimizer_state = _optimizer_state(self.optimizer)
        self.scaler = scaler
        self.scaler_state = copy.deepcopy(scaler.state_dict()) if scaler is not None else None
        self.random = random_states()
        self.objects = [(part, dict(vars(part))) for loader in loaders for part in parts(loader)]
        if accelerator is not None:
            gradient_state = accelerator.gradient_state
            self.objects.append((gradient_state, {k: list(v) if isinstance(v, list) else v for k, v in vars(gradient_state).items()}))
        generators = [value for _, content in self.objects for value in content.values() if isinstance(value, torch.Generator)]
        self.generators = [(generator, generator.get_state()) for generator in generators]
        datasets = [loader.dataset for loader in loaders if hasattr(loader, "dataset")]
        self.epochs = [(dataset, vars(dataset)["epoch"]) for dataset in datasets if "epoch" in getattr(dataset, "__dict__", {})]

    def restore(self) -> None:
        """Put everything back in place."""
        for module, training in self.modes:
            module.training = training
        with torch.no_grad():
            for tensor, value, grad, grad_value in self.tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
                tensor.grad = grad
                if grad is not None and grad_value is not None:
                    grad.copy_(grad_value)
        if self.optimizer is not None:
            groups, state = self.optimizer_state
            for group, content in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(content)
            self.optimizer.state.clear()
            self.optimizer.state.update(copy_state(state))
        if self.scaler is not None:
            self.scaler.load_state_dict(copy.deepcopy(self.scaler_state))
        restore_random(self.random)
        for part, content in self.objects:
            vars(part).clear()
            vars(part).update(content)
        for generator, position in self.generators:
            generator.set_state(position)
        for dataset, epoch in self.epochs:
            dataset.epoch = epoch


def parts(loader: Any) -> list[Any]:
    """The loader, and the loaders and samplers inside it, that have attributes."""
    found: list[Any] = []
    queue = [loader]
    while queue:
        part = queue.pop()
        if hasattr(part, "__dict__") and not any(part is other for other in found):
            found.append(part)
            queue += [getattr(part, name, None) for name in PARTS]
    return found


def random_states() -> tuple[Any, ...]:
    """Of torch's CPU and current CUDA generator, numpy and random."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), cuda, numpy.random.get_state(), random.getstate()


def restore_random(states: tuple[Any, ...]) -> None:
    cpu, cuda, numpy_state, python_state = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    numpy.random.set_state(numpy_state)
    random.setstate(python_state)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return tensor.detach().clone() if tensor is not None else None


def _optimizer_state(optimizer: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    if optimizer is None:
        return [], {}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return groups, copy_state(optimizer.state)


def copy_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """Per-parameter state copied; its keys, the parameters, are not."""
    return {
        parameter: {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in content.items()}
        for parameter, content in state.items()
    }
