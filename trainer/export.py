"""The exported model, output_dir/model: written as a whole, loaded without executing anything."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from trainer.files import beside, link_or_copy, replace_folder, write_json
from trainer.models.build import build_model
from trainer.models.weights import WEIGHTS_FILE, load_tensors
from trainer.runtime import UserError

# The folder's name in a run's.
MODEL = "model"
CONFIG_FILE = "config.json"
MODEL_FILES = (WEIGHTS_FILE, CONFIG_FILE, "scaler.json")


def contiguous(module: nn.Module) -> dict[str, Tensor]:
    """The module's state_dict, as `copied` gives it."""
    return copied(module.state_dict())


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: safetensors refuses views of shared or permuted memory (channels_last, tied weights)."""
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file; written by Python, so that a full disk is an OSError and the file has the user's usual permissions.

    Raises:
        OSError: it cannot be written.
    """
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def save_model(folder: Path, module: nn.Module, config: dict[str, Any], scaler: dict[str, Any] | None) -> None:
    """Write model.safetensors, config.json and, with a GradScaler, scaler.json; replaces the folder. On one process only.

    Args:
        module: the plain model; its keys are the file's.
        config: what `load_model` needs to build the model and its preprocessing, and what the user wants to know of it.
        scaler: the GradScaler's state, numbers, for fine-tuning later.
    """
    temporary = beside(folder)
    write_tensors(temporary / "model.safetensors", contiguous(module))
    write_json(temporary / CONFIG_FILE, config)
    if scaler is not None:
        write_json(temporary / "scaler.json", scaler)
    # The checkpoint that follows shares these files, and flushes them.
    replace_folder(temporary, folder, to_disk=False)


def take_over(source: Path, target: Path) -> None:
    """Fill the folder `target` with the model of `source`: the weights, which nobody edits, shared on the disk, the small files copied."""
    weights, *small = MODEL_FILES
    link_or_copy(source / weights, target / weights)
    for name in small:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def find_model(path: str | Path) -> Path:
    """The model folder that is meant: the folder itself, or the one in a run's folder."""
    path = Path(path)
    inside = path / MODEL
    return inside if not (path / CONFIG_FILE).exists() and (inside.is_dir() or inside.with_name(f".{MODEL}.old").is_dir()) else path


def read_model(folder: str | Path, factory: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The plain model of a `model` folder, on the CPU, in evaluation mode, and its config.json.

    Args:
        factory: the `package.module:factory` of a model of one's own, whose code is then run; a folder alone cannot have any run.

    Raises:
        UserError: the folder or one of its files is missing, broken, or of another model.
    """
    folder = Path(folder)
    # A save that was killed between its two renames left the earlier model here.
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and old.exists():
        folder = old
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
        architecture = config["architecture"]
        if factory is not None and ":" not in architecture:
            raise UserError(f"the model folder {folder} is of {architecture}, and not of {factory}: leave --model out")
        if ":" in architecture and architecture != factory:
            raise UserError(
                f"the model folder {folder} is of {architecture}, which is code, and a folder alone has none run: name that factory too "
                f"(--model {architecture})"
            )
        module = build_model(architecture, config["in_channels"], tuple(config["size"]), config["num_classes"])
        load_tensors(module, tensors)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the model folder {folder} cannot be loaded: {' '.join(str(error).split())}: name another run's") from None
    return module.eval(), config
