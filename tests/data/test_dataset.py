"""Images of many kinds to the pixels they must become, and broken ones refused by name."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers import SIDE, Rows, ids_image, ids_of, png
from trainer.data.dataset import ImageDataset, Shape, Transform, identity
from trainer.data.decode import ImageError
from trainer.data.sampler import pack_key
from trainer.runtime import UserError


def record(content: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"image": {"bytes": content, "path": path}}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def dataset_of(contents: list[bytes], mode: str = "L", transform: Transform | None = None, seed: int = 0) -> ImageDataset:
    return ImageDataset(
        "--dataset some", Rows([record(content) for content in contents]), list(range(len(contents))), Shape(mode, (SIDE, SIDE)), transform, seed
    )


def plain(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (SIDE, SIDE), colour)


def palette() -> Image.Image:
    image = plain("P", 3)
    image.putpalette([0, 0, 0, 255, 255, 255, 1, 2, 3, 10, 200, 30])
    return image


@pytest.mark.parametrize(
    ("content", "grey", "rgb"),
    [
        pytest.param(encoded(plain("L", 77)), 77, (77, 77, 77), id="grey"),
        pytest.param(encoded(plain("RGB", (200, 100, 50))), 124, (200, 100, 50), id="RGB"),
        pytest.param(encoded(plain("RGB", (255, 0, 0))), 76, (255, 0, 0), id="red"),
        pytest.param(encoded(palette()), 124, (10, 200, 30), id="palette"),
        pytest.param(encoded(palette(), transparency=3), 124, (10, 200, 30), id="transparent palette"),
        pytest.param(encoded(palette(), "GIF"), 124, (10, 200, 30), id="GIF"),
        pytest.param(encoded(plain("1", 1)), 255, (255, 255, 255), id="1 bit, white"),
        pytest.param(encoded(plain("1", 0)), 0, (0, 0, 0), id="1 bit, black"),
        pytest.param(encoded(plain("LA", (7, 0))), 7, (7, 7, 7), id="grey, alpha"),
        pytest.param(encoded(plain("RGBA", (9, 99, 199, 0))), 83, (9, 99, 199), id="RGBA"),
        pytest.param(encoded(plain("CMYK", (255, 0, 0, 0)), "TIFF"), 179, (0, 255, 255), id="CMYK, cyan"),
        pytest.param(encoded(plain("CMYK", (0, 0, 0, 255)), "TIFF"), 0, (0, 0, 0), id="CMYK, black"),
        pytest.param(encoded(plain("CMYK", (0, 100, 200, 50)), "JPEG", quality=100), 140, (205, 125, 44), id="CMYK JPEG, stored inverted"),
    ],
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_colours(content: bytes, grey: int, rgb: tuple[int, int, int], in_memory: bool) -> None:
    for mode, expected in (("L", (grey,)), ("RGB", rgb)):
        dataset = dataset_of([content], mode)
        if in_memory:
            dataset.decode_all()
        images, labels, _ = dataset.__getitems__([0])
        assert (images.dtype, images.shape) == (torch.uint8, (1, *dataset.shape)) == (torch.uint8, (1, len(expected), SIDE, SIDE))
        assert (labels.dtype, labels.tolist()) == (torch.int64, [0])
        assert images[0].flatten(1).unique(dim=1).T.tolist() == [list(expected)]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_rows_and_columns_keep_their_places(mode: str) -> None:
    shape = (4, 6) if mode == "L" else (4, 6, 3)
    pixels = numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8)
    dataset = ImageDataset("--dataset some", Rows([record(png(Image.fromarray(pixels)))]), [3], Shape(mode, (4, 6)))
    image, label, _ = dataset[0]
    numpy.testing.assert_array_equal(image.permute(1, 2, 0).numpy().reshape(shape), pixels)
    assert int(label) == 3
    assert dataset.nbytes() == pixels.size


def test_decoded_in_memory_equals_decoded_each_time() -> None:
    each_time, in_memory = (dataset_of([png(ids_image(i)) for i in range(20)]) for _ in range(2))
    in_memory.decode_all()
    assert in_memory.rows is None
    keys = [pack_key(epoch, index) for epoch, index in ((0, 3), (5, 19), (5, 0), (2, 3))]
    for one, other in zip(each_time.__getitems__(keys), in_memory.__getitems__(keys), strict=True):
        assert torch.equal(one, other)
    images, labels, same = in_memory.__getitems__(keys)
    assert ids_of(images) == labels.tolist() == [3, 19, 0, 3]
    assert same.tolist() == keys
    assert torch.equal(in_memory.gather(list(range(20))), each_time.gather(list(range(20))))


GOOD = png(ids_image(1))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(GOOD[:60], "cannot be read (", id="truncated"),
        pytest.param(encoded(Image.fromarray(numpy.zeros((8, 8, 3), "uint8")), "JPEG")[:300], "cannot be read (", id="truncated JPEG"),
        pytest.param(b"", "cannot be read (", id="empty"),
        pytest.param(b"hello", "cannot be read (", id="a text"),
        pytest.param(encoded(Image.fromarray(numpy.full((8, 8), 40_000, "uint16"))), "has more than 8 bits a channel", id="16 bits"),
        pytest.param(encoded(Image.fromarray(numpy.full((8, 8), 70_000, "int32")), "TIFF"), "has more than 8 bits a channel", id="32 bits"),
        pytest.param(encoded(Image.fromarray(numpy.full((8, 8), 0.5, "float32")), "TIFF"), "has more than 8 bits a channel", id="float"),
        pytest.param(
            png(Image.new("L", (9, 7))),
            "is 9 x 7 pixels, the first one of the train split 8 x 8: all images must have one size",
            id="another size",
        ),
    ],
)
@pytest.mark.parametrize("path", [None, "train/cat/2.png"])
def test_a_broken_image_is_named(content: bytes, reason: str, path: str | None) -> None:
    rows = Rows([record(GOOD), record(GOOD), record(content, path)])
    name = "--dataset some: image 2 " + (f"({path}) " if path else "")
    for whole in (False, True):
        dataset = ImageDataset("--dataset some", rows, [0, 1, 2], Shape("L", (SIDE, SIDE)))
        assert dataset.__getitems__([1])[1].tolist() == [1]
        with pytest.raises(UserError) as raised:
            dataset.decode_all() if whole else dataset.__getitems__([1, 2])
        assert str(raised.value).startswith(name + reason)
        assert "\n" not in str(raised.value)


def test_images_can_lie_in_files_of_their_own(tmp_path: Path) -> None:
    ids_image(300).save(tmp_path / "a.png")
    dataset = ImageDataset("--dataset some", [record(None, str(tmp_path / name)) for name in ("a.png", "gone.png")], [0, 1], Shape("L", (SIDE, SIDE)))
    assert ids_of(dataset.gather([0])) == [300]
    with pytest.raises(UserError, match=rf"image 1 \({tmp_path}/gone.png\) cannot be read"):
        dataset.gather([1])


def test_a_workers_refusal_is_still_one_sentence() -> None:
    """torch raises it anew in the training process, with the worker's traceback as its text."""
    dataset = dataset_of([GOOD, GOOD[:60]])
    collate: Any = identity
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate)
    batches: Any = iter(loader)
    with pytest.raises(ImageError) as raised:
        next(batches)
    # Left to the garbage collector, which the traceback makes late, the worker is waited for 5 s.
    batches._shutdown_workers()
    assert str(raised.value) == "--dataset some: image 1 cannot be read (image file is truncated): replace or remove it"


def test_open_image_decodes_at_once() -> None:
    with pytest.raises(UserError):
        open_image("--dataset some", 0, record(GOOD[:60])["image"])


def noise(image: Tensor) -> Tensor:
    """Uses all three generators; the draws are in the first three pixels."""
    image = image.clone()
    draws = float(torch.rand(())), float(numpy.random.rand()), random.random()
    image[0, 0, :3] = torch.tensor([int(256 * draw) for draw in draws], dtype=torch.uint8)
    return image


def draws(dataset: ImageDataset, *keys: tuple[int, int]) -> list[tuple[int, ...]]:
    images = dataset.__getitems__([pack_key(epoch, index) for epoch, index in keys])[0]
    return [tuple(image[0, 0, :3].tolist()) for image in images]


def test_augmentation_is_a_function_of_seed_epoch_and_sample() -> None:
    contents = [png(ids_image(i)) for i in range(30)]
    dataset = dataset_of(contents, transform=noise)
    keys = [(epoch, index) for epoch in range(3) for index in range(30)]
    first = draws(dataset, *keys)
    assert len(set(first)) == len(keys)
    assert draws(dataset, *keys[::-1]) == first[::-1], "it depends on the sample's place in the batch"
    assert draws(dataset, keys[40]) == [first[40]]
    dataset.decode_all()
    assert draws(dataset, *keys) == first, "memory changes it"
    assert not set(draws(dataset_of(contents, transform=noise, seed=1), *keys)) & set(first)


def test_augmentation_leaves_the_process_and_the_memory_alone() -> None:
    dataset = dataset_of([png(ids_image(i)) for i in range(4)], transform=noise)
    dataset.decode_all()
    before = dataset.gather([0, 1, 2, 3]).clone()
    states = torch.get_rng_state(), pickle.dumps(numpy.random.get_state()), random.getstate()
    draws(dataset, (0, 0), (0, 1), (0, 2), (0, 3))
    after = torch.get_rng_state(), pickle.dumps(numpy.random.get_state()), random.getstate()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert torch.equal(dataset.gather([0, 1, 2, 3]), before)


def test_it_can_be_sent_to_a_spawned_worker() -> None:
    dataset = dataset_of([GOOD], transform=noise)
    copy = pickle.loads(pickle.dumps(dataset))
    assert draws(copy, (1, 0)) == draws(dataset, (1, 0))
