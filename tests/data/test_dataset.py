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
from trainer.data.dataset import LEFT_OUT, ImageDataset, Parts, Shape, Transform, identity
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
        "--dataset some",
        Rows([record(content) for content in contents]),
        list(range(len(contents))),
        Shape(mode, (SIDE, SIDE)),
        transform,
        seed,
    )


def plain(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (SIDE, SIDE), colour)


def palette() -> Image.Image:
    image = plain("P", 3)
    image.putpalette([0, 0, 0, 255, 255, 255, 1, 2, 3, 10, 200, 30])
    return image


def sixteen(value: int, dtype: str = "uint16") -> Image.Image:
    return Image.fromarray(numpy.full((SIDE, SIDE), value, dtype))


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
        pytest.param(encoded(palette(), transparency=b"\0\x80\xff\x10"), 124, (10, 200, 30), id="palette, alpha in bytes"),
        pytest.param(encoded(sixteen(40_000)), 156, (156, 156, 156), id="16 bits"),
        pytest.param(encoded(sixteen(255)), 1, (1, 1, 1), id="16 bits, dark"),
        pytest.param(encoded(sixteen(65_535), "TIFF"), 255, (255, 255, 255), id="16 bits, TIFF"),
        pytest.param(encoded(sixteen(40_000, ">u2"), "TIFF"), 156, (156, 156, 156), id="16 bits, TIFF, big-endian"),
        pytest.param(encoded(sixteen(40_000), "PPM"), 156, (156, 156, 156), id="16 bits, PGM"),
        pytest.param(encoded(sixteen(40_000, "int32"), "TIFF"), 156, (156, 156, 156), id="16 bits in 32"),
        pytest.param(encoded(plain("YCbCr", (76, 85, 255)), "JPEG", quality=100), 76, (254, 0, 0), id="YCbCr"),
        pytest.param(encoded(plain("RGB", (200, 100, 50)), "WEBP", lossless=True), 124, (200, 100, 50), id="WebP"),
        pytest.param(encoded(plain("RGB", (200, 100, 50)), "BMP"), 124, (200, 100, 50), id="BMP"),
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


def bad_split(on_bad: Any, bad: tuple[int, ...], count: int = 6, content: bytes = b"", **options: Any) -> ImageDataset:
    """Images 0..count-1, of which some cannot be read; their labels are ten times their numbers."""
    rows = Rows([record(content if index in bad else png(ids_image(index))) for index in range(count)])
    return ImageDataset("--dataset some", rows, [10 * i for i in range(count)], Shape("L", (SIDE, SIDE)), on_bad=on_bad, **options)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("bad", "stands_in"),
    [((2,), {2: 3}), ((2, 3), {2: 4, 3: 4}), ((5,), {5: 0}), ((4, 5, 0), {4: 1, 5: 1, 0: 1}), ((1, 4), {1: 2, 4: 5})],
)
def test_the_next_good_image_replaces_a_bad_one(in_memory: bool, bad: tuple[int, ...], stands_in: dict[int, int]) -> None:
    """With its label; whatever else is in the batch. The key then tells that it is another one's."""
    dataset = bad_split("replace", bad)
    if in_memory:
        dataset.decode_all()
    for epoch, order in ((0, [0, 1, 2, 3, 4, 5]), (3, [5, 2, 4]), (1, [bad[0]])):
        keys = [pack_key(epoch, index) for index in order]
        images, labels, told = dataset.__getitems__(keys)
        shown = [stands_in.get(index, index) for index in order]
        assert ids_of(images) == shown
        assert labels.tolist() == [10 * index for index in shown]
        assert told.tolist() == [~key if index in bad else key for index, key in zip(order, keys, strict=True)]
    assert ids_of(dataset.gather(range(6))) == [stands_in.get(index, index) for index in range(6)]
    assert dataset.labels.tolist() == [0, 10, 20, 30, 40, 50], "they are part of what a resume compares"


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_bad_image_is_left_out(in_memory: bool) -> None:
    dataset = bad_split("leave out", (1, 4))
    if in_memory:
        dataset.decode_all()
    images, labels, told = dataset.__getitems__([0, 1, 4, 5])
    assert labels.tolist() == [0, LEFT_OUT, LEFT_OUT, 50]
    assert told.tolist() == [0, ~1, ~4, 5]
    assert not images[1:3].any()
    assert ids_of(images)[::3] == [0, 5]


def test_a_replaced_image_is_augmented_by_its_place_in_the_epoch() -> None:
    dataset = bad_split("replace", (2,), transform=noise)
    expected = draws(dataset, (0, 2))
    assert draws(bad_split("replace", (), transform=noise), (0, 2)) == expected
    dataset.decode_all()
    assert draws(dataset, (0, 2)) == expected


@pytest.mark.parametrize("in_memory", [False, True])
def test_where_all_are_bad_there_is_an_end(in_memory: bool) -> None:
    everything = bad_split("replace", tuple(range(6)))
    with pytest.raises(UserError, match=r"^--dataset some: none of its 6 images can be read: replace them$"):
        everything.decode_all() if in_memory else everything.__getitems__([0])


@pytest.mark.parametrize("on_bad", ["replace", "leave out"])
def test_another_size_is_no_bad_image(on_bad: str) -> None:
    """Half of the data would be left out without a word."""
    dataset = bad_split(on_bad, (2,), content=png(Image.new("L", (9, 7))))
    with pytest.raises(UserError, match="say by --image_size"):
        dataset.__getitems__([2])
    with pytest.raises(UserError, match="say by --image_size"):
        dataset.decode_all()


def test_a_bad_image_can_still_be_asked_for_by_name() -> None:
    dataset = bad_split("replace", (2,), numbers=[7, 8, 9, 10, 11, 12])
    assert ids_of(dataset.open(3)[None]) == [3]
    with pytest.raises(ImageError, match="image 9 cannot be read"):
        dataset.open(2)


def random_crops(size: int = 24, **options: Any) -> ImageDataset:
    rows = Rows([record(png(ids_image(index).resize((size, size)))) for index in range(12)])
    shape = Shape("L", (SIDE, SIDE), resize=True)
    return ImageDataset("--dataset some", rows, list(range(12)), shape, random_crop=True, **options)


def test_random_parts_are_a_function_of_seed_epoch_and_sample() -> None:
    dataset = random_crops(seed=1)
    keys = [pack_key(epoch, index) for epoch in (0, 1) for index in range(12)]
    images = dataset.__getitems__(keys)[0]
    assert torch.equal(dataset.__getitems__(keys[::-1])[0], images.flip(0)), "they depend on the place in the batch"
    assert torch.equal(dataset.__getitems__(keys[5:6])[0], images[5:6])
    assert len({tuple(image.flatten().tolist()) for image in images}) == 24
    assert not torch.equal(random_crops(seed=2).__getitems__(keys)[0], images)
    centres = dataset.gather(range(12))
    assert torch.equal(centres, random_crops(seed=2).gather(range(12))), "what is measured is not drawn"
    with pytest.raises(AssertionError):
        dataset.decode_all()


GOOD = png(ids_image(1))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(GOOD[:60], "cannot be read (", id="truncated"),
        pytest.param(encoded(Image.fromarray(numpy.zeros((8, 8, 3), "uint8")), "JPEG")[:300], "cannot be read (", id="truncated JPEG"),
        pytest.param(b"", "cannot be read (", id="empty"),
        pytest.param(b"hello", "cannot be read (", id="a text"),
        pytest.param(
            encoded(Image.fromarray(numpy.full((8, 8), 70_000, "int32")), "TIFF"),
            "cannot be read (its pixels are 70000 to 70000: save it with 8 or 16 bits a channel)",
            id="32 bits",
        ),
        pytest.param(
            encoded(Image.fromarray(numpy.full((8, 8), 0.5, "float32")), "TIFF"),
            "cannot be read (its pixels are fractions: save it with 8 or 16 bits a channel)",
            id="float",
        ),
        pytest.param(
            png(Image.new("L", (9, 7))),
            "is 9 x 7 pixels, the first one of the train split 8 x 8: say by --image_size which size all are to get",
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
    dataset = ImageDataset(
        "--dataset some", Rows([record(None, str(tmp_path / name)) for name in ("a.png", "gone.png")]), [0, 1], Shape("L", (SIDE, SIDE))
    )
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


def test_workers_decode_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, what replaces a broken one, and the sentence that names it."""
    monkeypatch.setattr("trainer.data.dataset.ROWS", 16)
    monkeypatch.setattr("trainer.data.dataset.MANY", 64)
    records = [{"image": {"bytes": png(ids_image(number)), "path": None}} for number in range(70)]
    records[37]["image"]["bytes"] = b"broken"
    splits = [ImageDataset("ids", Rows(records), [0] * 70, Shape("L", (SIDE, SIDE)), on_bad="replace") for _ in range(2)]
    # A worker that finds no shared memory for a tensor, as in a container, is waited for for ever.
    assert all(isinstance(part, numpy.ndarray) for part in Parts(splits[0])[0])
    for split, workers in zip(splits, (1, 2), strict=True):
        split.decode_all(workers)
    one, two = (split.__getitems__(list(range(70))) for split in splits)
    assert all(map(torch.equal, one, two))
    assert one[0][38].equal(one[0][37])
    strict = ImageDataset("ids", Rows(records), [0] * 70, Shape("L", (SIDE, SIDE)))
    with pytest.raises(ImageError, match=r"^ids: image 37 cannot be read \(it is no image of a known kind\): replace or remove it$"):
        strict.decode_all(2)
