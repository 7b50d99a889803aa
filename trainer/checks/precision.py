"""The precision that really runs is the one asked for, and fp16 goes through its GradScaler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.checks.base import Result, Subject
from trainer.checks.loaders import first_batches

DTYPES = {"no": None, "fp16": "float16", "bf16": "bfloat16"}
SCALER_CALLS = ("scale", "step", "update")


def check(subject: Subject) -> Result:
    """A forward pass tells the dtype; `train_step`, where it is known, whether the scaler is used."""
    batches: list[Any] = []
    subject.each(lambda: batches.extend(first_batches(subject.train_loader, 1)))
    seen = subject.each(lambda: _observe(subject, batches[0]))
    dtypes = {dtype for dtype, _, _ in seen}
    if len(dtypes) > 1 or len({scaled for _, scaled, _ in seen}) > 1:
        return Result("FAIL", f"ranks differ: autocast {', '.join(str(dtype) for dtype, _, _ in seen)}; launch all with the same precision")
    dtype, scaled, calls = seen[0]
    running = f"autocast {dtype}" if dtype else "no autocast"
    asked = subject.precision
    if asked in DTYPES and DTYPES[asked] != dtype:
        return Result("FAIL", f"{asked} was asked for, but the model runs with {running}: fp16 needs a GPU; run the model under autocast")
    if dtype == "float16" and not scaled:
        return Result("FAIL", "fp16 without a GradScaler: small gradients become 0; use torch.amp.GradScaler, or bf16")
    text = f"{asked + ': ' if asked else ''}{running}, {'GradScaler on' if scaled else 'no GradScaler'}"
    if scaled and calls is None:
        return Result("PASS", f"{text} (whether an update uses it: train_step {subject.absent})")
    if scaled and calls is not None:
        skipped = [name for name in SCALER_CALLS if not calls[name]]
        if skipped:
            return Result(
                "FAIL",
                f"{text}, but an update does not call scaler.{', scaler.'.join(skipped)}: use accelerator.backward(loss) and the prepared "
                "optimizer, or scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
            )
        text += ", used by an update"
    return Result("PASS", text)


def _observe(subject: Subject, batch: Any) -> tuple[str | None, bool, dict[str, int] | None]:
    """Autocast's dtype inside the model, whether there is an active scaler, and how often an update calls it."""
    assert subject.model is not None
    scaler = subject.scaler
    scaled = scaler is not None and scaler.is_enabled()
    dtypes: list[str | None] = []
    handle = _inner_layer(subject.module).register_forward_pre_hook(lambda *_: dtypes.append(_autocast(subject.device.type)))
    try:
        if subject.train_step is None:
            subject.model.eval()
            with torch.no_grad():
                subject.forward(subject.model, batch)
            return dtypes[0], scaled, None
        subject.model.train()
        with counted(scaler if scaled else None) as calls:
            subject.train_step(batch)
        return dtypes[0], scaled, calls
    finally:
        handle.remove()


def _inner_layer(module: nn.Module) -> nn.Module:
    """A layer with weights inside the model: Accelerate enters autocast after the model's own hooks have run."""
    layers = [layer for layer in module.modules() if not list(layer.children()) and list(layer.parameters(recurse=False))]
    return layers[0] if layers else module


def _autocast(kind: str) -> str | None:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


@contextmanager
def counted(scaler: Any) -> Iterator[dict[str, int]]:
    """Counts the calls of a scaler's methods inside the block."""
    calls = dict.fromkeys(SCALER_CALLS, 0)

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*arguments, **options)

        return call

    if scaler is not None:
        for name in SCALER_CALLS:
            setattr(scaler, name, counting(name, getattr(scaler, name)))
    try:
        yield calls
    finally:
        if scaler is not None:
            for name in SCALER_CALLS:
                delattr(scaler, name)
