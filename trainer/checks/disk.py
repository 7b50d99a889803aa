"""Room for the checkpoints, before the training that is to write them."""

import shutil
from typing import Any

import torch
from torch import Tensor

from trainer.checks.base import Result, Subject, existing, quantity

# Copies of the trained weights that an optimizer keeps, where it has not stepped yet and does not show them.
COPIES = {"SGD": 1, "Adam": 2, "AdamW": 2}


def check(subject: Subject) -> Result:
    """The main process's disk; one checkpoint more than are kept, since the new one is written before the oldest goes."""
    model = sum(tensor.nbytes for tensor in subject.module.state_dict().values() if isinstance(tensor, Tensor))
    one = model + _optimizer_bytes(subject.optimizer) + subject.averages
    needed = one * (subject.checkpoints + 1)
    folder = existing(subject.folder)
    free = subject.each(lambda: shutil.disk_usage(folder).free if subject.rank == 0 else 0)[0]
    text = (
        f"{quantity(subject.checkpoints, 'checkpoint')} of {size(one)} and one being written: {size(needed)}; {size(free)} free at {folder}"
    )
    if needed > free:
        return Result("FAIL", f"{text}: keep fewer of them (--save_total_limit) or choose another --output_dir")
    return Result("PASS", text)


def size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _optimizer_bytes(optimizer: Any) -> int:
    if optimizer is None:
        return 0
    plain = getattr(optimizer, "optimizer", optimizer)
    held = sum(value.nbytes for content in plain.state.values() for value in content.values() if isinstance(value, torch.Tensor))
    trained = sum(parameter.nbytes for group in plain.param_groups for parameter in group["params"])
    return held or trained * COPIES.get(type(plain).__name__, 2)
