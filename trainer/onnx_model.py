"""A model as an ONNX file, pixels in and logits out, checked against the model itself."""

import importlib
import io
import json
import os
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.inference import Preprocess
from trainer.runtime import RunError, UserError

# Of the logits' difference, in units of the largest logit or 1; what other orders of summation give in float32 is far below it.
TOLERANCE = 1e-4
# Of the check; other than the batch that is exported with, so that a fixed size shows.
CHECKED = (1, 5)


class Pixels(nn.Module):
    """uint8 (N, C, H, W) -> logits (N, classes), float32: the model with its normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", preprocess.normalize.mean)
        self.register_buffer("std", preprocess.normalize.std)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images.float() / 255 - self.mean) / self.std)
        return logits


def check_packages() -> None:
    """Whether what the export needs is installed.

    Raises:
        UserError: it is not.
    """
    try:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"to_onnx needs onnx, onnxscript and onnxruntime ({error}): pip install 'accelerate-trainer[onnx]'") from None


def export(model: nn.Module, preprocess: Preprocess, file: Path) -> float:
    """Write `file`, whole or not at all; returns the largest difference of a logit on random images.

    The graph takes `images`, uint8 (N, C, H, W) with any N, and gives `logits`, float32 (N, classes). Its metadata name the classes, the
    mode ('L' or 'RGB') and the size (height, width).

    Raises:
        RunError: torch cannot export the model, or the file's logits are other ones.
    """
    module = Pixels(model, preprocess).eval()
    shape = (1 if preprocess.mode == "L" else 3, *preprocess.size)
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> Tensor:
        return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)

    beside = file.with_name(f".{file.name}.tmp")
    try:
        try:
            write(module, images(2), preprocess, beside)
            difference, largest = compare(module, [images(count) for count in CHECKED], beside)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise RunError(f"torch.onnx cannot export this model, or not for any number of images ({reason})") from None
        if not difference <= TOLERANCE * max(1.0, largest):
            raise RunError(
                f"the exported logits differ from the model's by up to {difference:.1e}, more than {TOLERANCE:g} of the largest, "
                f"{largest:.3g}: no file is written"
            )
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
    return difference


def write(module: nn.Module, example: Tensor, preprocess: Preprocess, file: Path) -> None:
    """Export to `file`."""
    program: Any
    # It tells its steps on stdout, and warns of its own internals.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            verbose=False,
        )
        program.model.metadata_props.update(
            {"classes": json.dumps(preprocess.classes, ensure_ascii=False), "mode": preprocess.mode, "size": json.dumps(preprocess.size)}
        )
        program.save(str(file), external_data=False)


@torch.no_grad()
def compare(module: nn.Module, batches: list[Tensor], file: Path) -> tuple[float, float]:
    """The largest difference between the module's logits and the file's, run by onnxruntime on the CPU; and the largest logit."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    difference = largest = 0.0
    for batch in batches:
        expected = module(batch)
        found = torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])
        if found.shape != expected.shape:
            raise ValueError(f"its logits are {tuple(found.shape)} instead of {tuple(expected.shape)}")
        difference = max(difference, float((found - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return difference, largest
