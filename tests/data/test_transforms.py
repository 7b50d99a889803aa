"""Statistics and normalisation, against numpy."""

import numpy
import pytest
import torch
from PIL import Image

from tests.helpers import Rows, png
from trainer.data import transforms
from trainer.data.dataset import ImageDataset, Shape
from trainer.data.transforms import Normalize, normalisation, pixel_statistics


def images(mode: str, count: int = 23) -> tuple[ImageDataset, "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]"]:
    """A data set of `count` random 5 x 7 images, and their pixels as (count, 5, 7, C)."""
    channels = 1 if mode == "L" else 3
    limits = numpy.array([256, 100, 3][:channels])
    pixels = numpy.random.default_rng(1).integers(0, limits, (count, 5, 7, channels), dtype=numpy.uint8)
    rows = Rows({"image": {"bytes": png(Image.fromarray(image.squeeze(-1) if channels == 1 else image)), "path": None}} for image in pixels)
    return ImageDataset("some", rows, [0] * count, Shape(mode, (5, 7))), pixels


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("chunk", [1, 70, 1000, 1 << 22])
def test_statistics_equal_numpys(monkeypatch: pytest.MonkeyPatch, mode: str, in_memory: bool, chunk: int) -> None:
    monkeypatch.setattr(transforms, "CHUNK_BYTES", chunk)
    dataset, pixels = images(mode)
    if in_memory:
        dataset.decode_all()
    mean, std = pixel_statistics(dataset)
    scaled = pixels.astype(numpy.float64) / 255
    numpy.testing.assert_allclose(mean, scaled.mean((0, 1, 2)), rtol=0, atol=1e-12)
    numpy.testing.assert_allclose(std, scaled.std((0, 1, 2)), rtol=0, atol=1e-12)


def test_a_constant_channel_is_not_divided_by_zero() -> None:
    content = png(Image.new("RGB", (5, 7), (51, 0, 255)))
    dataset = ImageDataset("some", Rows([{"image": {"bytes": content, "path": None}}] * 3), [0] * 3, Shape("RGB", (7, 5)))
    mean, std = pixel_statistics(dataset)
    assert mean == pytest.approx((0.2, 0.0, 1.0), abs=1e-15)
    assert std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize(mode: str, dtype: torch.dtype) -> None:
    dataset, pixels = images(mode)
    statistics = pixel_statistics(dataset)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        normalize = Normalize(*statistics)
    finally:
        torch.set_default_dtype(default)
    output = normalize(dataset.gather(list(range(23))))
    assert (output.dtype, output.shape) == (dtype, (23, *dataset.shape))
    mean, std = (numpy.array(values) for values in statistics)
    expected = torch.from_numpy(((pixels / 255 - mean) / std).transpose(0, 3, 1, 2))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(output.double().mean((0, 2, 3)), torch.zeros(len(mean), dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.double().std((0, 2, 3), correction=0), torch.ones(len(mean), dtype=torch.float64), rtol=0, atol=1e-5)


def test_without_statistics_pixels_are_only_scaled() -> None:
    output = Normalize((0.0,), (1.0,))(torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3))
    torch.testing.assert_close(output.flatten(), torch.tensor([0.0, 0.2, 1.0]), rtol=0, atol=1e-7)


def test_the_three_kinds_of_normalisation() -> None:
    """ImageNet's numbers are torchvision's; a grey image has the averages over the colours."""
    from torchvision.transforms._presets import ImageClassification

    preset = ImageClassification(crop_size=224)
    (grey, _), (colour, _) = images("L"), images("RGB")
    assert normalisation("imagenet", colour) == (tuple(preset.mean), tuple(preset.std))
    mean, std = normalisation("imagenet", grey)
    assert mean == pytest.approx((0.449,))
    assert std == pytest.approx((0.226,))
    assert normalisation("none", colour) == ((0.0,) * 3, (1.0,) * 3)
    assert normalisation("dataset", colour) == pixel_statistics(colour)
    assert len({str(normalisation(kind, grey)) for kind in ("dataset", "none", "imagenet")}) == 3
