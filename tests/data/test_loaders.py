"""The data of a run: batch sizes planned, splits opened, and the same batches whatever the cache and the workers."""

import io
import multiprocessing.process
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers import SIDE, alone_run, ids_image, ids_of, png, write_ids, write_parquet
from tests.ranks import Ranks, alone
from trainer.config import Config
from trainer.data.dataset import LEFT_OUT, Batch, Shape, Transform
from trainer.data.loaders import Data, load_data, load_eval_data, plan_batches
from trainer.data.sampler import BatchPlan, EpochSampler
from trainer.data.transforms import spread
from trainer.runtime import Processes, UserError


@pytest.mark.parametrize(
    ("knobs", "processes", "batch_size", "global_batch_size"),
    [
        ({}, 1, 32, 32),
        ({}, 4, 32, 128),
        ({"batch_size": 7}, 3, 7, 21),
        ({"batch_size": 7, "gradient_accumulation_steps": 2}, 3, 7, 42),
        ({"global_batch_size": 96}, 1, 96, 96),
        ({"global_batch_size": 96}, 2, 48, 96),
        ({"global_batch_size": 96, "gradient_accumulation_steps": 4}, 3, 8, 96),
        ({"global_batch_size": 96, "batch_size": 32}, 3, 32, 96),
        ({"global_batch_size": 4}, 4, 1, 4),
    ],
)
def test_batch_sizes(knobs: dict[str, Any], processes: int, batch_size: int, global_batch_size: int) -> None:
    plan = plan_batches(Config(**knobs), 1000, processes)
    assert plan == BatchPlan(1000, processes, batch_size, knobs.get("gradient_accumulation_steps", 1))
    assert plan.global_batch_size == global_batch_size


@pytest.mark.parametrize(
    ("knobs", "samples", "processes", "message"),
    [
        (
            {"global_batch_size": 100},
            1000,
            3,
            "--global_batch_size 100 cannot be divided by 3 processes x 1 accumulation steps: choose a multiple of 3",
        ),
        (
            {"global_batch_size": 96, "gradient_accumulation_steps": 5},
            1000,
            2,
            "--global_batch_size 96 cannot be divided by 2 processes x 5 accumulation steps: choose a multiple of 10",
        ),
        (
            {"global_batch_size": 2},
            1000,
            4,
            "--global_batch_size 2 cannot be divided by 4 processes x 1 accumulation steps: choose a multiple of 4",
        ),
        (
            {"global_batch_size": 96, "batch_size": 16},
            1000,
            2,
            "--batch_size 16 x 2 processes x 1 accumulation steps is not --global_batch_size 96: leave one of them out",
        ),
        ({}, 3, 4, "the train split has 3 images, fewer than the 4 processes: use fewer processes"),
    ],
)
def test_batch_sizes_refused(knobs: dict[str, Any], samples: int, processes: int, message: str) -> None:
    with pytest.raises(UserError) as raised:
        plan_batches(Config(**knobs), samples, processes)
    assert str(raised.value) == message


def loaded(processes: Processes, folder: Path, knobs: dict[str, Any], transform: Transform | None = None) -> Data:
    return load_data(Config(dataset=str(folder), **knobs), processes, transform)


def write_images(folder: Path, train: list[Any], test: list[Any]) -> Path:
    folder.mkdir()
    for split, images in (("train", train), ("test", test)):
        write_parquet(folder / f"{split}.parquet", images, [0] * len(images))
    return folder


def test_what_is_known_of_the_data(tmp_path: Path) -> None:
    data = alone(loaded, write_ids(tmp_path / "ids", train=20, test=6), {"batch_size": 8})
    assert (len(data.train), len(data.test), data.test_split) == (20, 6, "test")
    assert data.classes == tuple("0123456789")
    assert data.train.shape == data.test.shape == (1, SIDE, SIDE)
    pixels = numpy.stack([numpy.asarray(ids_image(i)) for i in range(20)]) / 255
    assert data.mean == (pytest.approx(pixels.mean(), abs=1e-12),)
    assert data.std == (pytest.approx(pixels.std(), abs=1e-12),)
    assert data.plan == BatchPlan(20, 1, 8, 1)


def test_normalize_none_only_scales(tmp_path: Path) -> None:
    data = alone(loaded, write_images(tmp_path / "set", [Image.new("RGB", (8, 8))] * 2, [Image.new("RGB", (8, 8))]), {"normalize": "none"})
    assert (data.mean, data.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("LA", 1), ("I;16", 1), ("RGB", 3), ("RGBA", 3), ("P", 3), ("CMYK", 3)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_training_images_all_over_the_split_tell_the_channels(tmp_path: Path, mode: str, channels: int, place: int) -> None:
    train: list[Any] = [Image.new("L", (8, 8))] * 3
    file = io.BytesIO()
    Image.new(mode, (8, 8)).save(file, "TIFF")
    train[place] = file.getvalue()
    folder = write_images(tmp_path / "set", train, [Image.new("RGB", (8, 8))])
    data = alone(loaded, folder, {})
    assert data.train.shape == data.test.shape == (channels, 8, 8)
    assert data.about == ("grey (3 images looked at are grey)" if channels == 1 else "colour (1 of 3 images looked at have colours)")
    for asked in (1, 3):
        data = alone(loaded, folder, {"channels": str(asked)})
        assert data.train.shape == data.test.shape == (asked, 8, 8)
        assert "--channels" in data.about


def test_at_most_64_images_are_looked_at_evenly_spread(tmp_path: Path) -> None:
    assert spread(5, 64).tolist() == [0, 1, 2, 3, 4]
    assert spread(128, 64).tolist() == list(range(0, 128, 2))
    assert spread(1000, 3).tolist() == [0, 333, 666]
    assert spread(10**9, 5000)[-1] == 999_800_000
    train = [Image.new("RGB" if index == 129 else "L", (8, 8)) for index in range(192)]
    folder = write_images(tmp_path / "set", train, train[:1])
    assert alone(loaded, folder, {"cache": "none"}).about == "colour (1 of 64 images looked at have colours)"


def sized(*sizes: tuple[int, int]) -> list[Image.Image]:
    return [Image.new("L", size, 10 * index) for index, size in enumerate(sizes, start=1)]


def test_images_of_several_sizes_become_one(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", sized((8, 8), (30, 20), (16, 40)), sized((9, 50), (4, 4)))
    for knobs, shape in (({"image_size": "16"}, (1, 16, 16)), ({"image_size": "12x20"}, (1, 12, 20))):
        data = alone(loaded, folder, knobs)
        assert data.train.shape == data.test.shape == shape
        assert data.train.images is not None
        assert data.train.images[:, 0, 0, 0].tolist() == [10, 20, 30]
        assert data.about.endswith(", resized from 8 x 8 to 16 x 40, the centre")


def write_every_kind(folder: Path) -> None:
    """Files of every kind, of several sizes, each of one colour: orange in train/orange, dark grey in train/grey."""
    orange, grey = (255, 128, 0), 64
    palette = Image.new("P", (20, 30), 1)
    palette.putpalette([0, 0, 0, *orange])
    deep = {dtype: Image.fromarray(numpy.full((30, 20), 64 * 257, dtype)) for dtype in ("uint16", ">u2", "int32")}
    turned = Image.Exif()
    turned[0x0112] = 6
    kinds: list[tuple[str, Image.Image, dict[str, Any]]] = [
        ("orange/rgb.png", Image.new("RGB", (16, 16), orange), {}),
        ("orange/rgb.jpg", Image.new("RGB", (90, 70), orange), {"quality": 95}),
        ("orange/turned.JPEG", Image.new("RGB", (40, 64), orange), {"quality": 95, "exif": turned}),
        ("orange/cmyk.jpg", Image.new("CMYK", (30, 30), (0, 127, 255, 0)), {"quality": 95}),
        ("orange/cmyk.tif", Image.new("CMYK", (30, 30), (0, 127, 255, 0)), {}),
        ("orange/alpha.png", Image.new("RGBA", (30, 40), (*orange, 0)), {}),
        ("orange/alpha.webp", Image.new("RGBA", (30, 40), (*orange, 255)), {"lossless": True}),
        ("orange/palette.png", palette, {}),
        ("orange/transparent.png", palette, {"transparency": b"\x10\x80"}),
        ("orange/palette.gif", palette, {"transparency": 1}),
        ("orange/rgb.bmp", Image.new("RGB", (33, 21), orange), {}),
        ("orange/rgb.ppm", Image.new("RGB", (33, 21), orange), {}),
        ("grey/l.png", Image.new("L", (16, 16), grey), {}),
        ("grey/l.jpg", Image.new("L", (200, 100), grey), {"quality": 95}),
        ("grey/la.png", Image.new("LA", (20, 20), (grey, 0)), {}),
        ("grey/16.png", deep["uint16"], {}),
        ("grey/16.tif", deep["uint16"], {}),
        ("grey/16b.tiff", deep[">u2"], {}),
        ("grey/32.tiff", deep["int32"], {}),
        ("grey/16.pgm", deep["int32"], {}),
        ("black/1.png", Image.new("1", (20, 20), 0), {}),
        ("black/1.tif", Image.new("1", (20, 20), 0), {}),
    ]
    for split in ("train", "val"):
        for name, image, options in kinds:
            path = folder / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, **options)


def every_kind(processes: Processes, folder: Path, cache: Any) -> tuple[Tensor, list[str]]:
    data = load_data(Config(data_dir=str(folder), image_size="12x16", cache=cache), processes)
    assert torch.equal(data.train.gather(range(len(data.train))), data.test.gather(range(len(data.test))))
    return data.train.gather(range(len(data.train))), [data.classes[label] for label in data.train.labels.tolist()]


def test_a_folder_of_every_kind_of_image(two_ranks: Ranks, tmp_path: Path) -> None:
    write_every_kind(tmp_path)
    images, classes = alone(every_kind, tmp_path, "ram")
    assert images.shape == (22, 3, 12, 16)
    colours = torch.tensor([{"orange": (255, 128, 0), "grey": (64, 64, 64), "black": (0, 0, 0)}[name] for name in classes])
    assert int((images.int() - colours[:, :, None, None]).abs().max()) <= 3
    for cache in ("ram", "none"):
        for found, names in two_ranks.run(every_kind, tmp_path, cache):
            assert torch.equal(found, images)
            assert names == classes


@pytest.mark.parametrize("augment", ["light", "trivialaugment"])
def test_what_needs_the_original_is_not_kept_decoded(tmp_path: Path, augment: str) -> None:
    """The test split is, and the training images too where they have their final size already."""
    folder = write_images(tmp_path / "set", sized((32, 32), (32, 32)), sized((32, 32)))
    knobs = {"augment": augment, "image_size": "16"}
    data = alone(loaded, folder, knobs)
    assert data.train.random_crop
    assert (data.train.images, data.test.images is not None) == (None, True)
    assert data.about.endswith(", resized from 32 x 32, random parts in training, else the centre")
    for cache in ("ram", "device"):
        with pytest.raises(UserError, match=f"^--cache {cache} keeps each image at its final size, but --augment {augment} takes another"):
            alone(loaded, folder, {**knobs, "cache": cache})
    for other in ({"augment": augment, "image_size": "32"}, {"augment": augment}, {"image_size": "16"}):
        data = alone(loaded, folder, other)
        assert not data.train.random_crop
        assert data.train.images is not None


def test_bad_headers_are_passed_over_where_they_are_to_be(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", [b"", Image.new("L", (8, 8)), b""], [b"", Image.new("L", (8, 8))])
    data = alone(loaded, folder, {"on_bad_image": "skip", "val_fraction": None})
    assert data.train.shape == (1, 8, 8)
    assert data.train.__getitems__([0, 1, 2])[2].tolist() == [~0, 1, ~2]
    assert data.test.__getitems__([0, 1])[1].tolist() == [LEFT_OUT, 0]
    with pytest.raises(UserError, match="image 0 cannot be read"):
        alone(loaded, folder, {})
    with pytest.raises(UserError, match=r": none of 2 training images that were looked at can be read: replace them$"):
        alone(loaded, write_images(tmp_path / "none", [b"", b""], [b""]), {"on_bad_image": "skip"})


def test_what_was_held_out_is_part_of_what_a_resume_compares(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=60, test=2)
    prints = [
        alone(loaded, folder / "train.parquet", {"val_fraction": 0.5, "seed": seed, "cache": "none"}).fingerprint for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1]
    assert prints[0]["held_out"] != prints[2]["held_out"]
    assert "held_out" not in alone(loaded, folder, {}).fingerprint


def measured(processes: Processes, folder: Path, cache: str) -> tuple[Any, Any]:
    data = loaded(processes, folder, {"cache": cache})
    return data.mean, data.std


def test_statistics_are_the_same_for_any_cache_and_number_of_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=21, test=2)
    expected = alone(measured, folder, "ram")
    assert alone(measured, folder, "none") == expected
    assert two_ranks.run(measured, folder, "ram") == two_ranks.run(measured, folder, "none") == [expected] * 2


@pytest.mark.parametrize(("cache", "free", "in_memory"), [("auto", 2, True), ("auto", 1.9, False), ("ram", 0, True), ("none", 99, False)])
def test_what_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, free: float, in_memory: bool) -> None:
    """'auto' keeps what takes at most half of the free memory; `free` counts in sizes of both splits."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * 26 * SIDE * SIDE))
    data = alone(loaded, write_ids(tmp_path / "ids", train=20, test=6), {"cache": cache})
    assert [split.images is not None for split in (data.train, data.test)] == [in_memory] * 2


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        pytest.param([(3, 8)], [(3, 8)], "images are 3 x 8 pixels, at least 4 are needed: enlarge them by --image_size", id="too small"),
        pytest.param(
            [(8, 8), (8, 9)], [(8, 8)], "image 1 is 8 x 9 pixels, --dataset SET: image 0 8 x 8: say by --image_size which", id="train"
        ),
        pytest.param(
            [(8, 8)], [(8, 8), (9, 8)], "(test): image 1 is 9 x 8 pixels, the first one of the train split 8 x 8: say by --", id="test"
        ),
    ],
)
def test_sizes_refused(tmp_path: Path, train: list[tuple[int, int]], test: list[tuple[int, int]], message: str) -> None:
    folder = write_images(tmp_path / "set", [Image.new("L", size) for size in train], [Image.new("L", size) for size in test])
    with pytest.raises(UserError) as raised:
        alone(loaded, folder, {})
    assert message in str(raised.value).replace(str(folder), "SET")


def refused(processes: Processes, folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        loaded(processes, folder, {})
    assert raised.value.agreed
    return str(raised.value)


def test_all_ranks_end_with_the_broken_images_name(two_ranks: Ranks, tmp_path: Path) -> None:
    broken = write_images(tmp_path / "broken", [ids_image(0), png(ids_image(1))[:60], ids_image(2)], [ids_image(3)])
    texts = two_ranks.run(refused, broken)
    assert texts == [f"--dataset {broken}: image 1 cannot be read (image file is truncated): replace or remove it"] * 2
    few = write_ids(tmp_path / "few", train=1)
    assert two_ranks.run(refused, few) == ["the train split has 1 images, fewer than the 2 processes: use fewer processes"] * 2


def refused_here(processes: Processes, folders: tuple[Path, Path]) -> str:
    return refused(processes, folders[processes.rank])


def test_another_hosts_other_copy_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    """Of other lengths the ranks would wait for each other at the end of an epoch."""
    zero, one = two_ranks.run(refused_here, (write_ids(tmp_path / "ids"), write_ids(tmp_path / "more", train=128)))
    assert "is not the same on all processes (rank 0 has 96 and 16 images, rank 1 128 and 16; " in zero
    assert one.partition(" is not ")[2] == zero.partition(" is not ")[2]


def test_two_ranks_load_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    zero, one = two_ranks.run(loaded, write_ids(tmp_path / "ids", train=21, test=5), {"global_batch_size": 8})
    assert torch.equal(zero.train.images, one.train.images)
    assert (zero.mean, zero.std, zero.classes, zero.plan) == (one.mean, one.std, one.classes, one.plan)
    assert zero.plan == BatchPlan(21, 2, 4, 1)


def shift(image: Tensor) -> Tensor:
    """An augmentation by all three generators."""
    amount = int(torch.randint(0, 99, ())) + int(numpy.random.randint(0, 99)) + random.randrange(99)
    return (image.int() + amount).remainder(256).to(torch.uint8)


def batches(folder: Path, transform: Transform | None, **knobs: Any) -> dict[str, list[Batch]]:
    """Two epochs of training batches and one of evaluation, from the prepared loaders."""
    with alone_run(folder, transform=transform, batch_size=8, eval_batch_size=4, **knobs) as run:
        found = {}
        for epoch in (0, 1):
            run.train_loader.set_epoch(epoch)
            found[f"epoch {epoch}"] = list(run.train_loader)
        found["test"] = list(run.eval_loader)
    return found


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("transform", [None, shift], ids=["plain", "augmented"])
def test_batches_are_the_same_from_memory_and_from_workers(tmp_path: Path, transform: Transform | None) -> None:
    folder = write_ids(tmp_path / "ids", train=20, test=6)
    expected = batches(folder, transform, cache="ram")
    assert [len(labels) for _, labels, _ in expected["epoch 0"]] == [8, 8, 4]
    assert not same(expected["epoch 0"], expected["epoch 1"])
    for knobs in ({"cache": "none"}, {"cache": "device"}, {"cache": "ram", "num_workers": 2}, {"cache": "none", "num_workers": 2}):
        found = batches(folder, transform, **knobs)
        for part in expected:
            assert same(found[part], expected[part]), (knobs, part)
    different = batches(folder, transform, seed=1)
    assert not same(different["epoch 0"], expected["epoch 0"])
    assert same(different["test"], expected["test"])


def test_training_is_in_the_epochs_order_and_evaluation_in_the_splits(tmp_path: Path) -> None:
    found = batches(write_ids(tmp_path / "ids", train=20, test=6), None)
    sampler = EpochSampler(20, 0)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        ids = [i for images, *_ in found[f"epoch {epoch}"] for i in ids_of(images)]
        assert ids == sampler.order()
        assert [int(label) for _, labels, _ in found[f"epoch {epoch}"] for label in labels] == [i % 10 for i in ids]
    assert [ids_of(images) for images, *_ in found["test"]] == [[0, 1, 2, 3], [4, 5]]


def test_evaluation_is_not_augmented(tmp_path: Path) -> None:
    folder = write_ids(tmp_path / "ids", train=20, test=6)
    assert same(batches(folder, shift)["test"], batches(folder, None)["test"])


def eval_sizes(processes: Processes, folder: Path) -> list[int]:
    from tests.helpers import make_run

    return [len(labels) for _, labels, _ in make_run(processes, folder, batch_size=2).eval_loader]


def test_the_evaluation_batch_is_at_most_a_ranks_share(two_ranks: Ranks, tmp_path: Path) -> None:
    """So that few images are spread over all ranks, and none is filled up with more repetitions than needed."""
    assert two_ranks.run(eval_sizes, write_ids(tmp_path / "ids", train=4, test=7)) == [[4], [4]]


@pytest.mark.parametrize(
    ("side", "knobs", "size"),
    [(32, {}, 250), (32, {"mixed_precision": "bf16"}, 1000), (33, {"mixed_precision": "bf16"}, 125), (33, {"eval_batch_size": 7}, 7)],
)
def test_images_evaluated_at_once(tmp_path: Path, side: int, knobs: dict[str, Any], size: int) -> None:
    folder = write_ids(tmp_path / "ids", train=10, test=1010)
    with alone_run(folder, image_size=str(side), cache="none", normalize="none", **knobs) as run:
        _, labels, _ = next(iter(run.eval_loader))
        assert len(labels) == size


@pytest.mark.parametrize("length", [75, 76])
def test_a_temporary_folder_whose_path_is_too_long_for_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """76 characters would leave the workers' sockets with 108, and the run would wait for them for ever."""
    folder = write_ids(tmp_path / "ids", train=20, test=6)
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    temporary /= "x" * (length - len(str(temporary)) - 1)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    if length == 75:
        assert len(batches(folder, None, num_workers=1)["test"]) == 2
        return
    with pytest.raises(UserError, match=r"--num_workers 1: .* set TMPDIR to one of 75 characters at most$"):
        batches(folder, None, num_workers=1)
    assert len(batches(folder, None)["test"]) == 2
    classes = tuple(str(number) for number in range(10))
    with pytest.raises(UserError, match="--num_workers 1: "):
        alone(lambda processes: load_eval_data(Config(dataset=str(folder), num_workers=1), processes, classes, Shape("L", (8, 8))))
