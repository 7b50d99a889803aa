"""An exported model and its preprocessing, for programs of one's own: `model, preprocess = load_model("runs/mine/model")`."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from trainer.data.decode import ImageError, to_pixels
from trainer.data.transforms import Normalize
from trainer.export import find_model, read_model
from trainer.runtime import UserError

# A file's path, its content, or an opened image.
Picture = str | Path | bytes | Image.Image


class Preprocess:
    """Images of any kind -> what the model takes: the channels, size and normalisation that it was trained with.

    An image of another size is cut to the model's proportions, its centre, and resized, as the trainer's evaluation does it.

    Attributes:
        classes: the names of the model's outputs, in their order.
        size: (height, width) of the model's images, pixels.
        mode: 'L' (grey, C = 1) or 'RGB' (C = 3).
        normalize: uint8 (B, C, H, W) -> float (B, C, H, W).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """`config`: a model folder's config.json."""
        self.classes = tuple(str(name) for name in config["classes"])
        height, width = config["size"]
        self.size = (int(height), int(width))
        self.mode = {1: "L", 3: "RGB"}[config["in_channels"]]
        self.normalize = Normalize(tuple(config["mean"]), tuple(config["std"]))

    def __call__(self, pictures: Picture | Sequence[Picture]) -> Tensor:
        """float32 (B, C, H, W), the model's input, on the CPU; one picture gives B = 1.

        Raises:
            UserError: a picture cannot be read.
        """
        several = [pictures] if isinstance(pictures, str | Path | bytes | Image.Image) else pictures
        batch: Tensor = self.normalize(torch.stack([self.pixels(picture) for picture in several]))
        return batch

    def pixels(self, picture: Picture) -> Tensor:
        """uint8 (C, H, W): decoded, cut and resized, not normalised.

        Raises:
            UserError: it cannot be read.
        """
        try:
            if isinstance(picture, Image.Image):
                return to_pixels(picture, self.mode, self.size)
            with Image.open(BytesIO(picture if isinstance(picture, bytes) else Path(picture).read_bytes())) as image:
                return to_pixels(image, self.mode, self.size)
        except Exception as error:
            name = picture if isinstance(picture, str | Path) else "the image"
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            if "BytesIO" in reason:
                reason = "it is no image of a known kind"
            raise ImageError(f"{name} cannot be read ({reason}): replace or remove it") from None


def load_model(folder: str | Path, factory: str | None = None) -> tuple[nn.Module, Preprocess]:
    """The plain model of a run or of its `model` folder, on the CPU, in evaluation mode; and its preprocessing.

    `model(preprocess("cat.jpg")).softmax(1)` is (1, classes): the probabilities of `preprocess.classes`.

    Args:
        factory: the `package.module:factory` of a model of one's own, whose code is then run; a folder alone cannot have any run.

    Raises:
        UserError: the folder or one of its files is missing, broken, or of another model.
    """
    folder = find_model(folder)
    module, config = read_model(folder, factory)
    return module, preprocessing(folder, config)


def preprocessing(folder: Path, config: dict[str, Any]) -> Preprocess:
    """The preprocessing that the config.json of `folder` says.

    Raises:
        UserError: it lacks a part, or has a wrong one.
    """
    try:
        found = Preprocess(config)
        if len(found.classes) != config["num_classes"]:
            raise ValueError(f"config.json names {len(found.classes)} classes, and the model has {config['num_classes']}")
    except Exception as error:
        reason = f"config.json lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"the model folder {folder} cannot be used: {reason}: name another run's") from None
    return found
