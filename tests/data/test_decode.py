"""Photos turned, cut and resized: against Pillow's and torchvision's own functions."""

import io
import math
from typing import Any

import numpy
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from trainer.data.decode import Box, ImageError, SizeError, centre, decode, open_image, random_part, true_size
from trainer.runtime import UserError


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with a few edges, as in a photo."""
    small = numpy.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=numpy.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return {"bytes": file.getvalue(), "path": None}


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def decoded(record: dict[str, Any], size: tuple[int, int], mode: str = "RGB", resize: bool = True, **options: Any) -> Tensor:
    return decode("some", 0, record, mode, size, resize=resize, **options)


def distance(one: Tensor, other: Tensor) -> float:
    """Mean difference of two images, in levels of 0..255."""
    return float((one.int() - other.int()).abs().float().mean())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_photos_are_turned(kind: str, orientation: int) -> None:
    """As Pillow turns them, at their own size and resized, and the header alone tells how high they are."""
    record = encoded(photo(60, 40), kind, exif=turned(orientation), **({"lossless": True} if kind == "WEBP" else {}))
    plain = Image.open(io.BytesIO(record["bytes"])).convert("RGB") if kind == "TIFF" else None
    expected = plain or ImageOps.exif_transpose(Image.open(io.BytesIO(record["bytes"]))).convert("RGB")
    size = (expected.height, expected.width)
    assert size == ((60, 40) if orientation > 4 else (40, 60))
    assert true_size(open_image("some", 0, record)) == size
    assert torch.equal(decoded(record, size, resize=False), tensor(expected))
    small = tensor(expected.resize((20, 20), Image.Resampling.BILINEAR, box_of(expected)))
    assert distance(decoded(record, (20, 20)), small) < 1


def box_of(image: Image.Image) -> tuple[float, float, float, float]:
    """The largest square in the middle."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return left, top, left + side, top + side


def test_broken_notes_beside_a_sound_photo_do_not_matter() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x03"
    record = encoded(photo(60, 40), "JPEG", exif=exif)
    assert true_size(open_image("some", 0, record)) == (40, 60)
    assert decoded(record, (40, 60), resize=False).shape == (3, 40, 60)


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(120, 80, (40, 40)), (80, 120, (40, 40)), (90, 90, (30, 30)), (128, 96, (48, 64)), (40, 40, (40, 40)), (20, 30, (40, 40))],
)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_centre_is_resized_as_torchvision_does(width: int, height: int, size: tuple[int, int], mode: str) -> None:
    """Resize of the shorter side, antialiased and bilinear, then CenterCrop."""
    image = photo(width, height).convert(mode)
    scale = max(size[0] / height, size[1] / width)
    whole = v2.functional.pil_to_tensor(image)
    resized = v2.functional.resize(whole, [round(height * scale), round(width * scale)], antialias=True)
    expected = v2.functional.center_crop(resized, list(size))
    found = decoded(encoded(image), size, mode)
    assert (found.dtype, found.shape) == (torch.uint8, expected.shape)
    assert int((found.int() - expected.int()).abs().max()) <= 2


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("factor", [2, 3, 4, 9])
@pytest.mark.parametrize("orientation", [1, 6])
def test_large_jpegs_are_decoded_small(monkeypatch: pytest.MonkeyPatch, factor: int, mode: str, orientation: int) -> None:
    """Never smaller than what is needed of them, and nearly as if decoded whole."""
    shapes: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def watched(self: Image.Image, size: Any, *arguments: Any) -> Image.Image:
        shapes.append((self.width, self.height))
        return resize(self, size, *arguments)

    monkeypatch.setattr(Image.Image, "resize", watched)
    image = photo(48 * factor + 16, 48 * factor)
    record = encoded(image, "JPEG", quality=95, exif=turned(orientation))
    shapes.clear()
    found = decoded(record, (48, 48), mode)
    shrink = max(power for power in (1, 2, 4, 8) if power <= factor)
    assert min(shapes[0]) == math.ceil(48 * factor / shrink) >= 48
    whole = decoded(encoded(Image.open(io.BytesIO(record["bytes"])), "PNG", exif=turned(orientation)), (48, 48), mode)
    assert distance(found, whole) < 3


def test_the_part_that_is_taken_rules_how_small_it_is_decoded() -> None:
    """A quarter of the photo is needed at its full resolution."""
    record = encoded(photo(128, 128), "JPEG", quality=95)
    box: Box = (0.5, 0.25, 1.0, 0.75)
    found = decoded(record, (64, 64), crop=lambda height, width: box)
    assert distance(found, tensor(Image.open(io.BytesIO(record["bytes"])).crop((64, 32, 128, 96)))) == 0


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_random_parts(size: tuple[int, int]) -> None:
    """35 to 100 % of the area, proportions within a third of the wanted ones, all of it inside, everywhere."""
    draws = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    boxes = torch.tensor([random_part(size, *numbers)(300, 400) for numbers in draws], dtype=torch.float64)
    left, top, right, bottom = boxes.T
    assert float(boxes.min()) >= 0
    assert float(boxes.max()) <= 1
    width, height = 400 * (right - left), 300 * (bottom - top)
    area = width * height / 120_000
    assert 0.3 < float(area.min()) < 0.37
    assert 0.9 < float(area.max()) <= 1
    free = (width < 399) & (height < 299)
    stretch = (width / height / (size[1] / size[0]))[free]
    assert 0.74 < float(stretch.min()) < 0.77
    assert 1.3 < float(stretch.max()) < 1.34
    for edge, other in ((left, right), (top, bottom)):
        place = (edge / (1 - (other - edge)).clamp_min(1e-9))[free]
        assert 0.47 < float(place.mean()) < 0.53


def test_a_part_is_what_pillow_cuts_out() -> None:
    image = photo(80, 60)
    part = random_part((30, 30), 0.5, 0.5, 0.25, 0.75)
    box = part(60, 80)
    edges = (box[0] * 80, box[1] * 60, box[2] * 80, box[3] * 60)
    expected = tensor(image.resize((30, 30), Image.Resampling.BILINEAR, edges))
    assert torch.equal(decoded(encoded(image), (30, 30), crop=part), expected)


def test_the_centre_of_a_fitting_image_is_all_of_it() -> None:
    assert centre((30, 40))(60, 80) == (0, 0, 1, 1)
    image = photo(80, 60)
    assert torch.equal(decoded(encoded(image), (60, 80)), tensor(image))


def test_another_size_is_refused_where_none_is_asked_for() -> None:
    with pytest.raises(
        SizeError, match=r"^some: image 0 is 80 x 60 pixels, the first one of the train split 80 x 80: say by --image_size "
    ):
        decoded(encoded(photo(80, 60)), (80, 80), resize=False)
    assert issubclass(SizeError, ImageError)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"bytes": b"", "path": None}, "it is no image of a known kind"),
        ({"bytes": b"hello", "path": "a.png"}, "it is no image of a known kind"),
        ({"bytes": None, "path": "gone.png"}, "No such file or directory"),
        ({"bytes": None, "path": None}, "its row has none"),
        (None, "its row has none"),
        ({"bytes": encoded(photo(64, 64), "JPEG")["bytes"][:300], "path": None}, "[Tt]runcated"),
    ],
)
def test_what_is_no_image_is_named(record: Any, reason: str) -> None:
    path = f" \\({record['path']}\\)" if record and record["path"] else ""
    with pytest.raises(UserError, match=f"^some: image 7{path} cannot be read \\(.*{reason}.*\\): replace or remove it$"):
        decode("some", 7, record, "RGB", (64, 64))


def test_a_photo_too_large_to_be_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="decompression bomb"):
        decoded(encoded(photo(64, 64)), (32, 32))
