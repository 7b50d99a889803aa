"""Files on disk: the exported model; written beside, renamed into place, loaded without executing anything."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.models.build import build_model
from trainer.runtime import UserError


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def save_model(folder: Path, module: nn.Module, config: dict[str, Any], scaler: dict[str, Any] | None) -> None:
    """Write model.safetensors, config.json and, with a GradScaler, scaler.json; replaces the folder. On one process only.

    Args:
        module: the plain model; its keys are the file's.
        config: what `load_model` needs to build the model and its preprocessing, and what the user wants to know of it.
        scaler: the GradScaler's state, numbers, for fine-tuning later.
    """
    beside, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    for leftover in (beside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    beside.mkdir(parents=True)
    # safetensors refuses views of shared or permuted memory (channels_last, tied weights).
    tensors = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in module.state_dict().items()}
    save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
    write_json(beside / "config.json", config)
    if scaler is not None:
        write_json(beside / "scaler.json", scaler)
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_model(folder: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """The plain model of a `model` folder, on the CPU, in evaluation mode, and its config.json.

    Raises:
        UserError: the folder or one of its files is missing, broken, or of another model.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        module = build_model(config["architecture"], config["in_channels"], tuple(config["size"]), config["num_classes"])
        module.load_state_dict(tensors)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the model folder {folder} cannot be loaded: {' '.join(str(error).split())}") from None
    return module.eval(), config
