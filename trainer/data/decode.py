"""An encoded image of any kind -> uint8 pixels of the channels and the size that the model takes.

Grey, colour, palette, 1-bit, CMYK and 16-bit grey images become grey or RGB; alpha is dropped, not blended with a background. A photo is
turned as its EXIF orientation says. What is larger or smaller is cut to the wanted proportions and resized, bilinear and antialiased.
"""

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from trainer.runtime import UserError

GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")
# Of a palette with alpha the colours are wanted alone, of premultiplied ones what they were before.
THROUGH = {"P": "RGBA", "PA": "RGBA", "La": "LA", "RGBa": "RGBA"}
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A JPEG's decoder can leave out frequencies, and so halve the sides up to three times; not of images so small that rounding would count.
SHRINKS, SMALLEST_SHRUNK = (8, 4, 2), 16
SMALLEST_PART, LARGEST_STRETCH = 0.35, 4 / 3
# A part of an image, in shares of its width and height: left, top, right, bottom.
Box = tuple[float, float, float, float]
# (height, width) of an image, pixels -> the part of it to take.
Crop = Callable[[int, int], Box]

# Pillow warns of what it then reads nevertheless, once for each worker and image.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageError(UserError):
    """An image that cannot be trained on. torch raises a worker's exception anew with a traceback as its text, which ends with ours."""

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class SizeError(ImageError):
    """A sound image that has another size than the others, while nothing says which one all are to have."""


def describe(name: str, index: int, record: dict[str, Any] | None) -> str:
    path = record.get("path") if record is not None else None
    return f"{name}: image {index}" + (f" ({path})" if path else "")


def open_image(name: str, index: int, record: dict[str, Any] | None) -> Image.Image:
    """The image of a row, of which only the header is read.

    Args:
        name: what error messages call the data set.
        record: {"bytes", "path"}; the path counts where there are no bytes.

    Raises:
        ImageError: the file is missing, empty or no image.
    """
    try:
        if record is None or (record["bytes"] is None and record["path"] is None):
            raise ValueError("its row has none")
        content = record["bytes"]
        return Image.open(io.BytesIO(content if content is not None else Path(record["path"]).read_bytes()))
    except Exception as error:
        raise _unreadable(name, index, record, error) from None


def _unreadable(name: str, index: int, record: dict[str, Any] | None, error: Exception) -> ImageError:
    # Without the address of the bytes in memory, which differs from rank to rank.
    reason = " ".join(str(error).split()) if "BytesIO" not in str(error) else "it is no image of a known kind"
    return ImageError(f"{describe(name, index, record)} cannot be read ({reason}): replace or remove it")


def true_size(image: Image.Image) -> tuple[int, int]:
    """(height, width), pixels, as it is to be looked at, from its header."""
    turn = _turn(image)
    sideways = turn is not None and turn.name in ("TRANSPOSE", "TRANSVERSE", "ROTATE_90", "ROTATE_270")
    return image.size if sideways else (image.height, image.width)


def _turn(image: Image.Image) -> Image.Transpose | None:
    # Pillow turns TIFF files by itself; without anything beside the pixels there is nothing to look for.
    if not image.info or image.format == "TIFF":
        return None
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:
        # Broken notes beside a sound image.
        return None


def centre(size: tuple[int, int]) -> Crop:
    """The largest centred part that has the proportions of `size`, (height, width)."""

    def crop(height: int, width: int) -> Box:
        scale = min(height / size[0], width / size[1])
        x, y = (1 - size[1] * scale / width) / 2, (1 - size[0] * scale / height) / 2
        return x, y, 1 - x, 1 - y

    return crop


def random_part(size: tuple[int, int], *draws: float) -> Crop:
    """A part of 35 to 100 % of the area, whose proportions differ from those of `size`, (height, width), by up to a third.

    As Szegedy et al. 2015 cut ImageNet's training images, from a larger share than their 8 %. Where it would not fit it is cut off.

    Args:
        draws: area, proportions, horizontal and vertical place; uniform in [0, 1).
    """
    area = SMALLEST_PART + (1 - SMALLEST_PART) * draws[0]
    aspect = size[1] / size[0] * math.exp((2 * draws[1] - 1) * math.log(LARGEST_STRETCH))

    def crop(height: int, width: int) -> Box:
        share_x = min(1.0, math.sqrt(area * height * width * aspect) / width)
        share_y = min(1.0, math.sqrt(area * height * width / aspect) / height)
        x, y = draws[2] * (1 - share_x), draws[3] * (1 - share_y)
        return x, y, min(1.0, x + share_x), min(1.0, y + share_y)

    return crop


def decode(
    name: str, index: int, record: dict[str, Any] | None, mode: str, size: tuple[int, int], crop: Crop | None = None, resize: bool = False
) -> Tensor:
    """uint8 (C, height, width) pixels of a row's image.

    Args:
        name, index, record: see `open_image`.
        mode: 'L' (grey, C = 1) or 'RGB' (C = 3).
        size: (height, width), pixels.
        crop: the part of the image that becomes it.
        resize: an image of another size is resized, its centre where there is no `crop`; else it is refused.

    Raises:
        ImageError: the file is missing, empty, truncated or no image, or has pixels that are no shades of grey or colours.
        SizeError: it has another size.
    """
    image = open_image(name, index, record)
    try:
        if crop is None and not resize and (true := true_size(image)) != size:
            raise SizeError(
                f"{describe(name, index, record)} is {true[1]} x {true[0]} pixels, the first one of the train split "
                f"{size[1]} x {size[0]}: say by --image_size which size all are to get"
            )
        return to_pixels(image, mode, size, crop)
    except SizeError:
        raise
    except Exception as error:
        raise _unreadable(name, index, record, error) from None


def to_pixels(image: Image.Image, mode: str, size: tuple[int, int], crop: Crop | None = None) -> Tensor:
    """uint8 (C, height, width) pixels of an opened image.

    Args:
        mode, size, crop: see `decode`; one of another size is resized.

    Raises:
        Exception: of many kinds: it is truncated, or has pixels that are no shades of grey or colours.
    """
    turn = _turn(image)
    height, width = true_size(image) if turn is not None else (image.height, image.width)
    if crop is None and (height, width) != size:
        crop = centre(size)
    box = crop(height, width) if crop is not None else None
    if box is not None:
        _shrink(image, min((box[2] - box[0]) * width / size[1], (box[3] - box[1]) * height / size[0]))
    image.load()
    image = _convert(image, mode)
    if turn is not None:
        image = image.transpose(turn)
    if box is not None:
        edges = (box[0] * image.width, box[1] * image.height, box[2] * image.width, box[3] * image.height)
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, edges)
    pixels = torch.from_numpy(numpy.array(image, dtype=numpy.uint8))
    return pixels.reshape(*size, -1).permute(2, 0, 1)


def _shrink(image: Image.Image, factor: float) -> None:
    """Have a JPEG decoded smaller, by at most `factor`; other kinds stay as they are."""
    for shrink in SHRINKS:
        if shrink <= factor and min(image.size) >= shrink * SMALLEST_SHRUNK:
            image.draft(None, (image.width // shrink, image.height // shrink))
            return


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode == "F":
        raise ValueError("its pixels are fractions: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode in THROUGH:
        image = image.convert(THROUGH[image.mode])
    return image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey, also in whole numbers of 32 bits, to 8: 65535 becomes 255."""
    pixels = numpy.asarray(image).astype(numpy.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError(f"its pixels are {pixels.min()} to {pixels.max()}: save it with 8 or 16 bits a channel")
    return Image.fromarray(((pixels * 255 + 32767) // 65535).astype(numpy.uint8))
