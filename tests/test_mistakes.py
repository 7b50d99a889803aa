"""Users' mistakes: each one plain sentence that names the thing and the way to mend it, its exit code, and nothing half-written.

Each mistake is made on one and on two processes, by the command itself, in processes that live on; a few by a real launcher too.
"""

import io
import json
import os
import pickle
import py_compile
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import ids_image, png, write_ids, write_parquet
from tests.launching import ACCELERATE, CONFIGS, MAIN, finish, started
from tests.ranks import Ranks, rank_environment
from trainer.checkpoint import listed
from trainer.export import read_model
from trainer.files import write_manifest
from trainer.main import main
from trainer.runtime import REFUSED_ENGINES, UserError

LAUNCHERS_VARIABLES = tuple(name for name in rank_environment(0, 1, 1) if name != "OMP_NUM_THREADS")


@dataclass
class Place:
    """Where a mistake is made.

    Attributes:
        folder: the working directory.
        ids: a sound data set, 16 + 8 images.
        trained: a finished run on it: 2 epochs, 2 checkpoints.
        variables: what environment variables of the mistake are made of, when only the setup knows.
        later: closed when the mistake has been answered.
    """

    folder: Path
    ids: Path
    trained: Path
    variables: dict[str, str] = field(default_factory=dict)
    later: ExitStack = field(default_factory=ExitStack)

    def run(self) -> Path:
        """A copy of the finished run, as `run`."""
        return Path(shutil.copytree(self.trained, self.folder / "run"))

    def checkpoint(self, number: int = -1) -> Path:
        """A checkpoint of the copied run."""
        return listed(self.folder / "run" / "checkpoints")[number]


Setup = Callable[[Place], object]


@dataclass(frozen=True)
class Mistake:
    """A row of the table.

    Attributes:
        flags: as typed; {ids} is a sound data set. `--dataset` and `--output_dir out` are added where they are missing, but not "{none}".
        thing: what the sentence names: a file, flag or value.
        mend: what it says to do.
        setup: makes the mistake's files.
        variables: of the environment; None takes one of the launcher's away.
        code: of the worker.
        counts: numbers of processes.
        by_each: every process answers for itself, since they cannot find each other.
        trained: found in training, when there is a run already: the folder is there, and its exit.json tells.
    """

    flags: str
    thing: str
    mend: str
    setup: Setup = lambda place: None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    code: int = 2
    counts: tuple[int, ...] = (1, 2)
    by_each: bool = False
    trained: bool = False


# Recipes


def recipe(content: str | bytes) -> Setup:
    def setup(place: Place) -> None:
        (place.folder / "recipe.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())

    return setup


# Data


def data(train: int = 16, test: int = 8) -> Setup:
    return lambda place: write_ids(place.folder / "data", train, test)


def without(name: str) -> Setup:
    def setup(place: Place) -> None:
        (write_ids(place.folder / "data", 16, 8) / name).unlink()

    return setup


def truncated(name: str, size: int) -> Setup:
    def setup(place: Place) -> None:
        os.truncate(write_ids(place.folder / "data", 16, 8) / name, size)

    return setup


def no_rows(place: Place) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    file = write_ids(place.folder / "data", 16, 8) / "test.parquet"
    datasets.Dataset.from_dict({"image": [], "label": []}, features=features).to_parquet(str(file))


def texts(place: Place) -> None:
    (place.folder / "data").mkdir()
    for split in ("train", "test"):
        (place.folder / "data" / f"{split}.txt").write_text("x")


def labels(test: list[Any], label: str = "label", kind: str = "int64") -> Setup:
    def setup(place: Place) -> None:
        import datasets

        folder = place.folder / "data"
        folder.mkdir()
        types = {"image": datasets.Image(), label: datasets.Value(kind)}
        for split, numbers in (("train", [0, 1] * 4), ("test", test)):
            write_parquet(folder / f"{split}.parquet", [ids_image(i) for i in range(len(numbers))], numbers, **types)

    return setup


def images(change: Callable[[bytes], bytes], split: str = "train", classes: tuple[str, ...] = ("cat", "dog")) -> Setup:
    """A folder of PNG files, of which the last one of a split is changed."""

    def setup(place: Place) -> None:
        for part, names in (("train", ("cat", "dog")), ("test", classes)):
            for number, name in enumerate(names):
                folder = place.folder / "data" / part / name
                folder.mkdir(parents=True)
                for index in range(4):
                    content = png(ids_image(number * 4 + index))
                    changed = (part, number, index) == (split, 1, 3)
                    (folder / f"{index}.png").write_bytes(change(content) if changed else content)

    return setup


def other_size(content: bytes) -> bytes:
    return png(ids_image(3).resize((9, 9)))


def fractions(content: bytes) -> bytes:
    file = io.BytesIO()
    ids_image(3).convert("F").save(file, "TIFF")
    return file.getvalue()


def image_at(name: str, alone: bool = False) -> Setup:
    """An image where it does not belong, in a folder of classes that is sound otherwise, or alone in it."""

    def setup(place: Place) -> None:
        if not alone:
            images(lambda content: content)(place)
        path = place.folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(ids_image(0)))

    return setup


def broken_table(place: Place) -> None:
    paths_to_nowhere(place)
    (place.folder / "data" / "train.csv").write_text("image,label\na.png,a\nb.png,b,c,d\n")


def paths_to_nowhere(place: Place) -> None:
    (place.folder / "data").mkdir()
    for split in ("train", "test"):
        (place.folder / "data" / f"{split}.csv").write_text("image,label\ngone.png,a\ngone.png,b\n")


def truncated_in_parquet(place: Place) -> None:
    write_ids(place.folder / "data", 16, 8)
    contents = [png(ids_image(i))[: 60 if i == 3 else None] for i in range(16)]
    write_parquet(place.folder / "data" / "train.parquet", contents, [i % 10 for i in range(16)])


def other_names(place: Place) -> None:
    """Two files of one split whose numbers name other classes."""
    import datasets

    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        types = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        file = write_ids(place.folder / "data", 16, 8) / f"train-{number}.parquet"
        write_parquet(file, [ids_image(i) for i in range(4)], [0, 1] * 2, **types)
    (place.folder / "data" / "train.parquet").unlink()


def tiny(place: Place) -> None:
    folder = place.folder / "data"
    folder.mkdir()
    for split in ("train", "test"):
        write_parquet(folder / f"{split}.parquet", [ids_image(i).resize((3, 3)) for i in range(4)], [0, 1, 2, 3])


# Models


def own(name: str, text: str) -> Setup:
    """A module of one's own; compiled, so that importing it leaves nothing new behind."""

    def setup(place: Place) -> None:
        file = place.folder / f"{name}.py"
        file.write_text(f"{text}\n")
        py_compile.compile(str(file))

    return setup


def stored(content: Any) -> Setup:
    return lambda place: torch.save(content, place.folder / "some.pth")


def evil(name: str) -> Setup:
    def setup(place: Place) -> None:
        (place.folder / name).write_bytes(pickle.dumps(Payload(place.folder / "executed")))

    return setup


# Checkpoints


class Payload:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def hostile(name: str) -> Setup:
    """A pickle in place of the newest checkpoint's file, with a manifest that agrees."""

    def setup(place: Place) -> None:
        place.run()
        (place.checkpoint() / name).write_bytes(pickle.dumps(Payload(place.folder / "executed")))
        write_manifest(place.checkpoint())

    return setup


def hostile_torch_file(place: Place) -> None:
    place.run()
    torch.save(Payload(place.folder / "executed"), place.checkpoint() / "model.safetensors")
    write_manifest(place.checkpoint())


def changed(name: str, change: Callable[[Any], object]) -> Setup:
    """The newest checkpoint's JSON file with another content, and a manifest that agrees."""

    def setup(place: Place) -> None:
        place.run()
        file = place.checkpoint() / name
        content = json.loads(file.read_text(encoding="utf-8"))
        change(content)
        file.write_text(json.dumps(content), encoding="utf-8")
        write_manifest(place.checkpoint())

    return setup


def tensors_changed(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Setup:
    def setup(place: Place) -> None:
        place.run()
        tensors = load_file(place.checkpoint() / name)
        change(tensors)
        save_file(tensors, place.checkpoint() / name)
        write_manifest(place.checkpoint())

    return setup


def newest_truncated(place: Place) -> None:
    place.run()
    os.truncate(place.checkpoint() / "model.safetensors", 100)


def all_truncated(place: Place) -> None:
    place.run()
    for number in range(2):
        os.truncate(place.checkpoint(number) / "optimizer.safetensors", 100)


def manifest(content: str | None) -> Setup:
    def setup(place: Place) -> None:
        place.run()
        file = place.checkpoint() / "manifest.json"
        file.unlink()
        if content is not None:
            file.write_text(content, encoding="utf-8")

    return setup


def other_data(place: Place) -> None:
    place.run()
    write_ids(place.folder / "data", 24, 8)


def moved_checkpoint(place: Place) -> None:
    place.run()
    (place.folder / "backup").mkdir()
    shutil.copytree(place.checkpoint(), place.folder / "backup" / place.checkpoint().name)


# Folders and disks


def a_file(place: Place) -> None:
    (place.folder / "notes.txt").write_text("notes")


def mounted(options: str) -> Setup:
    """A disk of its own, as `disk`; read-only, or without room."""

    def setup(place: Place) -> None:
        disk = place.folder / "disk"
        disk.mkdir()
        if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=False).returncode:
            pytest.skip("mounting a tmpfs needs root")
        place.later.callback(lambda: subprocess.run(["umount", "-l", disk], check=True))

    return setup


def folder_in_the_way(place: Place) -> None:
    (place.folder / "run" / "env.json").mkdir(parents=True)


# Ports


def taken_port(place: Place) -> None:
    listener = place.later.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    place.variables["MASTER_PORT"] = str(listener.getsockname()[1])


ALONE_OF_TWO = {**rank_environment(0, 2, 1), "MASTER_PORT": "{MASTER_PORT}"}
NOBODY: dict[str, str | None] = {"RANK": None, "LOCAL_RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None, "WORLD_SIZE": "2"}

MISTAKES: dict[str, Mistake] = {
    # Flags
    "unknown flag": Mistake("--epoch 3", "unknown flag --epoch", "did you mean --epochs?"),
    "unknown flag like no other": Mistake("--zzz 3", "unknown flag --zzz", "see --help"),
    "stray word": Mistake("train", "'train'", "every setting is a flag, see --help"),
    "the tutorial's --gpu": Mistake("--gpu 0,1", "--gpu", "`accelerate launch --gpu_ids 0,1 trainer/main.py`"),
    "missing value": Mistake("--epochs", "--epochs", "needs a value: a whole number"),
    "wrong type": Mistake("--lr fast", "'fast'", "--lr must be a number"),
    "wrong word": Mistake(
        "--optimizer sdg", "'sdg'", "--optimizer must be one of sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta"
    ),
    "neither true nor false": Mistake("--tf32 maybe", "'maybe'", "--tf32 must be true or false"),
    "out of range": Mistake("--epochs 0", "but is 0", "--epochs must be at least 1"),
    "nan": Mistake("--lr nan", "'nan'", "--lr must be a number"),
    "no checkpoint ever": Mistake("--checkpointing_steps 0", "but is 0", "--checkpointing_steps must be at least 1"),
    "checkpoints at another word": Mistake("--checkpointing_steps epochs", "'epochs'", "a whole number or epoch"),
    "keep no checkpoint": Mistake("--save_total_limit 0", "but is 0", "--save_total_limit must be at least 1"),
    "negative hang_timeout": Mistake("--hang_timeout -1", "but is -1", "--hang_timeout must be at least 0"),
    "negative audit_interval": Mistake("--audit_interval -5", "but is -5", "--audit_interval must be at least 0"),
    "a tracker that is none": Mistake("--report_to wandb,tensorbord", "'tensorbord'", "did you mean tensorboard?"),
    "no tracker and one": Mistake("--report_to none,wandb", "'none' is not a tracker", "or none"),
    "a tracker that is not installed": Mistake("--report_to comet_ml,tensorboard", "--report_to comet_ml", "pip install comet_ml"),
    "a tracker that does not start": Mistake(
        "--report_to tensorboard,wandb --tracker_project_name a#b",
        "a tracker does not start (wandb.errors.",
        "correct it, or leave it out, or set WANDB_MODE=offline",
        variables={"WANDB_SILENT": "true"},
    ),
    "a project that is a folder": Mistake("--tracker_project_name ../x", "--tracker_project_name ../x", "choose another"),
    "a project without a name": Mistake('--tracker_project_name ""', "--tracker_project_name must not be empty", "leave it out"),
    "an unknown hook": Mistake("--comm_hook fp8", "--comm_hook", "none, fp16, bf16, powersgd"),
    "PowerSGD from before the first update on": Mistake("--powersgd_start -1", "but is -1", "--powersgd_start must be at least 0"),
    "PowerSGD of no column": Mistake("--powersgd_rank 0", "but is 0", "--powersgd_rank must be at least 1"),
    "local SGD of no update": Mistake("--local_sgd_steps 0", "but is 0", "--local_sgd_steps must be at least 1"),
    "checkpoints between averagings": Mistake("--local_sgd_steps 4 --checkpointing_steps 6", "--checkpointing_steps 6", "a multiple of"),
    "no patience": Mistake("--early_stopping_patience 0", "but is 0", "--early_stopping_patience must be at least 1"),
    "max_time as a word": Mistake("--max_time tomorrow", "'tomorrow'", "--max_time must be HH:MM:SS or seconds above 0"),
    "max_time zero": Mistake("--max_time 00:00:00", "'00:00:00'", "--max_time must be HH:MM:SS or seconds above 0"),
    "Nesterov's momentum of another optimizer": Mistake("--nesterov", "--nesterov needs --optimizer sgd", "or leave it out"),
    "a rate that falls upwards": Mistake("--min_lr 1 --lr 0.1", "--min_lr 1 is above --lr 0.1", "lower it"),
    "more than all of a label smoothed": Mistake("--label_smoothing 2", "but is 2", "--label_smoothing must be between 0 and 1"),
    "a share from no distribution": Mistake("--mixup -1", "but is -1", "--mixup must be at least 0"),
    "an average that never forgets enough": Mistake("--ema_decay 1.5", "but is 1.5", "--ema_decay must be between 0 and 1"),
    "a schedule that is none": Mistake("--lr_scheduler exponential", "'exponential'", "constant, linear, cosine, step, one_cycle, plateau"),
    "two flags that contradict": Mistake(
        "--scale_lr linear --global_batch_size 8", "--scale_lr linear contradicts --global_batch_size", "leave one of them out"
    ),
    "two batch sizes": Mistake("--batch_size 4 --global_batch_size 64", "--global_batch_size 64", "leave one of them out"),
    "a batch that cannot be divided": Mistake(
        "--global_batch_size 7 --gradient_accumulation_steps 2", "--global_batch_size 7", "choose a multiple of "
    ),
    "TF32 on a CPU": Mistake("--tf32", "--tf32 needs a CUDA GPU", "leave it out"),
    "sync_bn alone": Mistake("--sync_bn on", "--sync_bn on needs more than one process", "leave it at auto", counts=(1,)),
    "BatchNorm that drifts apart": Mistake(
        "--sync_bn off --broadcast_buffers false", "--sync_bn off with --broadcast_buffers false", "change one of them", counts=(2,)
    ),
    # Models
    "an unknown model": Mistake("--model resnet19", "--model resnet19: there is no such model", "did you mean resnet18, "),
    "a model like no other": Mistake(
        "--model zzz", "--model zzz", "give convnet, a classification model of torchvision, or package.module"
    ),
    "a model without a name": Mistake('--model ""', "--model must not be empty", "give it a value, or leave it out"),
    "images too small for the model": Mistake("--model inception_v3", "1 x 8 x 8", "choose another model, or images of another size"),
    "one image at a time where BatchNorm needs two": Mistake(
        "--model shufflenet_v2_x0_5 --batch_size 5", "a batch of one image", "choose another --batch_size", counts=(1,)
    ),
    "one image at a time on each of two": Mistake(
        "--model shufflenet_v2_x0_5 --batch_size 1 --sync_bn off", "a batch of one image", "choose another --batch_size", counts=(2,)
    ),
    "a factory that is nowhere": Mistake("--model nowhere:make", "the module nowhere cannot be imported", "start where it is found"),
    "a factory without its function": Mistake("--model own_1:make", "own_1 has no make", "did you mean made?", own("own_1", "made = 3")),
    "a factory that fails": Mistake(
        "--model own_2:make", "ZeroDivisionError: division by zero in ", "correct it", own("own_2", "def make(num_classes): 1 / 0")
    ),
    "a factory that wants more": Mistake(
        "--model own_3:make", "needs depth", "give the others defaults", own("own_3", "def make(depth, num_classes): ...")
    ),
    "a factory that makes nothing": Mistake(
        "--model own_4:make", "returns a NoneType", "let it return a torch.nn.Module", own("own_4", "def make(num_classes): ...")
    ),
    "a factory that does not know the classes": Mistake(
        "--model own_5:make",
        "returns 2 x 3 numbers for 2 images, not 2 x 10",
        "let it take num_classes",
        own("own_5", "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))"),
    ),
    "a factory that trains nothing": Mistake(
        "--model own_6:make",
        "no parameter that takes a gradient",
        "nothing to train",
        own("own_6", "from torch import nn\ndef make(): return nn.Flatten()"),
    ),
    "a backbone without a classifier": Mistake(
        "--model own_7:make --freeze backbone",
        "--freeze backbone finds no classifier in --model own_7:make",
        "leave --freeze out",
        own(
            "own_7",
            "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Unflatten(1, (10, 2)), "
            "nn.AvgPool1d(2), nn.Flatten())",
        ),
    ),
    "frozen by another word": Mistake("--freeze all", "'all'", "--freeze must be one of none, backbone"),
    "normalised by another word": Mistake("--normalize mean", "'mean'", "--normalize must be one of dataset, none, imagenet"),
    "no weights": Mistake("--weights nowhere.pth", "there is no file nowhere.pth", "name a model folder, a .safetensors file"),
    "a folder without weights": Mistake(
        "--weights empty", "there is no file empty/model.safetensors", "name a model folder", lambda place: (place.folder / "empty").mkdir()
    ),
    "weights that torchvision has not": Mistake(
        "--model shufflenet_v2_x0_5 --weights IMAGENET1K_V9", "IMAGENET1K_V9", "or one of torchvision's (IMAGENET1K_V1, DEFAULT)"
    ),
    "weights that cannot be downloaded": Mistake(
        "--model shufflenet_v2_x0_5 --weights DEFAULT",
        "https://download.pytorch.org/models/shufflenetv2_x0.5-f707e7126e.pth cannot be downloaded or read",
        "give it by --weights FILE",
        # A port that nobody listens on, also where there is a network.
        variables={"https_proxy": "http://127.0.0.1:1", "TORCH_HOME": "/nowhere"},
    ),
    "weights of another model": Mistake(
        "--model shufflenet_v2_x0_5 --weights run/model", "it lacks conv1.0.weight", "give weights of that model", Place.run
    ),
    "weights that are a training": Mistake(
        "--weights some.pth", "it holds model, epoch", "save the model's state_dict() alone", stored({"model": {}, "epoch": 3})
    ),
    "weights that are no file of torch": Mistake("--weights notes.txt", "notes.txt is no file of torch", "give a state dict", a_file),
    "a hostile pickle for pretrained weights": Mistake("--weights evil.pth", "evil.pth", "give a state dict", evil("evil.pth")),
    "a hostile pickle with a harmless name": Mistake(
        "--weights evil.safetensors", "evil.safetensors cannot be read", "give another file", evil("evil.safetensors")
    ),
    # Recipes
    "a hook that is nowhere": Mistake("--hooks nowhere:Hook", "--hooks nowhere:Hook: the module nowhere", "start where it is found"),
    "a hook without its module": Mistake("--hooks Loud", "--hooks Loud must be package.module:factory", "a Python module's name"),
    "a hook that wants more": Mistake(
        "--hooks hook_1:make",
        "--hooks hook_1:make cannot be made (TypeError: ",
        "it is called without arguments",
        own("hook_1", "def make(run): ..."),
    ),
    "a hook that is none": Mistake(
        "--hooks hook_2:make",
        "--hooks hook_2:make makes a dict",
        "a subclass of trainer.Hook",
        own("hook_2", "make = dict"),
    ),
    "a data function that is nowhere": Mistake(
        "--dataset nowhere:data", "the module nowhere cannot be imported", "start where it is found"
    ),
    "a data function that fails": Mistake(
        "--dataset data_1:make", "ZeroDivisionError: division by zero in ", "correct it", own("data_1", "def make(): return 1 / 0")
    ),
    "a data function that returns something else": Mistake(
        "--dataset data_2:make",
        "--dataset data_2:make returns a dict of list",
        "let it return a dict of datasets.Dataset",
        own("data_2", "def make(): return {'train': [1]}"),
    ),
    "a data function that is streamed": Mistake(
        "--dataset data_3:make --streaming", "--streaming is not for --dataset data_3:make", "leave it out", own("data_3", "make = dict")
    ),
    "no recipe": Mistake("--config nowhere.yaml", "nowhere.yaml", "the trainer's own recipes are imagefolder, mnist, mnist5k, tutorial"),
    "a recipe that is a folder": Mistake(
        "--config recipe.yaml", "recipe.yaml", "there is no file", lambda place: (place.folder / "recipe.yaml").mkdir()
    ),
    "a recipe that is no text": Mistake("--config recipe.yaml", "recipe.yaml", "give a YAML file", recipe(b"\x89PNG\r\n\x1a\n\0\0")),
    "a recipe that cannot be read": Mistake("--config /proc/self/mem", "/proc/self/mem", "give a YAML file"),
    "a recipe that is no YAML": Mistake("--config recipe.yaml", "recipe.yaml", "give a YAML file", recipe("lr: [1, 2\nepochs: 3\n")),
    "a recipe that is a list": Mistake("--config recipe.yaml", "recipe.yaml", "lines of 'key: value'", recipe("- lr\n- epochs\n")),
    "an empty recipe": Mistake("--config recipe.yaml", "recipe.yaml", "lines of 'key: value'", recipe("")),
    "unknown key": Mistake("--config recipe.yaml", "the recipe recipe.yaml", "did you mean lr?", recipe("lrr: 3\n")),
    "unknown key like no other": Mistake("--config recipe.yaml", "unknown key 'zzz'", "see --help", recipe("zzz: 3\n")),
    "a list for a value": Mistake("--config recipe.yaml", "recipe.yaml: lr", "must be one value", recipe("lr: [1, 2]\n")),
    "a wrong value in a recipe": Mistake("--config recipe.yaml", "'many'", "--epochs must be a whole number", recipe("epochs: many\n")),
    # Data
    "no data folder": Mistake("--dataset ./nowhere", "./nowhere is not there", "a local data set is a folder or a file"),
    "no folder of classes": Mistake("--data_dir nowhere", "nowhere is not there", "a local data set is a folder"),
    "a file for a data folder": Mistake("--dataset notes.txt", "notes.txt is a file of another kind", "or a folder", a_file),
    "a file for a folder of classes": Mistake("--data_dir notes.txt", "notes.txt is a file", "give the folder that holds", a_file),
    "an empty data folder": Mistake(
        "--dataset data", "--dataset data", "class folders of images, Parquet", lambda place: (place.folder / "data").mkdir()
    ),
    "an empty folder of classes": Mistake(
        "--data_dir data", "no class folders of images", "name their folder", lambda place: (place.folder / "data").mkdir()
    ),
    "an image in no class folder": Mistake(
        "--data_dir data", "data/train/4.png", "move it into one, or remove it", image_at("train/4.png")
    ),
    "a folder in a class folder": Mistake("--data_dir data", "data/train/dog/big", "must lie in", image_at("train/dog/big/4.png")),
    "a class folder without images": Mistake("--data_dir data", "data/train/fox", "add some, or remove it", image_at("train/fox/4.heic")),
    "one class": Mistake("--data_dir data --val_fraction 0.5", "'cat'", "add images of another one", image_at("cat/0.png", alone=True)),
    "two names for the data": Mistake("--dataset {ids} --data_dir data", "--data_dir data contradicts", "leave one of them out"),
    "a column of class folders": Mistake("--data_dir data --label_column kind", "--label_column", "leave one of them out"),
    "a share and a split": Mistake("--val_fraction 0.2 --eval_split test", "--val_fraction 0.2", "leave one of them out"),
    "a share of a set with a test split": Mistake("--val_fraction 0.2", "has the split 'test'", "leave --val_fraction out"),
    "a share of nothing": Mistake("--val_fraction 0", "but is 0", "above 0 and below 1"),
    "a share of everything": Mistake("--val_fraction 1", "but is 1", "above 0 and below 1"),
    "a share too small": Mistake(
        "--dataset {ids}/train.parquet --val_fraction 0.01", "holds out none of its 16 images", "give a larger one"
    ),
    "a single file without a share": Mistake("--dataset {ids}/train.parquet", "only 'train'", "--val_fraction 0.2"),
    "a broken single file": Mistake(
        "--dataset data/train.parquet", "data/train.parquet", "replace or remove", truncated("train.parquet", 500)
    ),
    "a broken table": Mistake("--dataset data", "data/train.csv", "replace or remove", broken_table),
    "no such split": Mistake("--eval_split val", "only the splits 'train', 'test'", "name one of them"),
    "no such split to train on": Mistake("--train_split all", "only the splits 'train', 'test'", "name one of them"),
    "one split for both": Mistake("--train_split test --eval_split test", "--eval_split test", "name another one"),
    "no such column": Mistake("--label_column kind", "only the columns 'image', 'label'", "name one of them"),
    "a column of no images": Mistake("--image_column label", "holds ClassLabel", "name another one"),
    "no such configuration": Mistake("--dataset_config large", "'large'", "choose one by --dataset_config"),
    "a configuration of a file": Mistake(
        "--dataset {ids}/train.parquet --dataset_config large --val_fraction 0.5", "--dataset_config large", "leave it out"
    ),
    "fractions for labels": Mistake(
        "--dataset data", "fractions (float64)", "give whole numbers or texts", labels([0.5, 1.5], kind="float64")
    ),
    "paths that lead nowhere": Mistake("--dataset data", "data/gone.png", "replace or remove it", paths_to_nowhere),
    "an image size that is none": Mistake("--image_size 64x", "'64x'", "--image_size must be N or HEIGHTxWIDTH"),
    "an image size too small": Mistake("--image_size 2", "'2'", "of 4 to 16384 pixels"),
    "channels of no kind": Mistake("--channels 4", "'4'", "--channels must be one of auto, 1, 3"),
    "a cache of parts": Mistake("--image_size 6 --augment light --cache ram", "--cache ram", "leave --cache out"),
    "erasing more than always": Mistake("--random_erasing 1.5", "but is 1.5", "between 0 and 1"),
    "a folder of texts": Mistake(
        "--dataset data",
        "no image column",
        "its columns are 'text'",
        texts,
    ),
    "a name that the Hub lacks": Mistake("--dataset someone/nothing", "'someone/nothing'", "check the name and the network"),
    "no test split": Mistake("--dataset data", "only 'train'", "test, validation, valid, val, eval, dev", without("test.parquet")),
    "no train split": Mistake("--dataset data", "no split 'train'", "only 'test'", without("train.parquet")),
    "an empty test split": Mistake("--dataset data", "--dataset data", "Parquet", no_rows),
    "a truncated Parquet file": Mistake("--dataset data", "data/train.parquet", "replace or remove", truncated("train.parquet", 500)),
    "an empty Parquet file": Mistake("--dataset data", "data/test.parquet", "replace or remove", truncated("test.parquet", 0)),
    "a truncated image": Mistake("--dataset data", "data/train/dog/3.png", "replace or remove it", images(lambda content: content[:60])),
    "an image of 0 bytes": Mistake("--dataset data", "data/train/dog/3.png", "replace or remove it", images(lambda content: b"")),
    "a truncated test image": Mistake(
        "--dataset data", "data/test/dog/3.png", "replace or remove it", images(lambda content: content[:60], split="test")
    ),
    "an image of another size": Mistake("--dataset data", "data/train/dog/3.png", "say by --image_size", images(other_size)),
    "an image of another size while bad ones are skipped": Mistake(
        "--dataset data --on_bad_image skip", "data/test/dog/3.png", "say by --image_size", images(other_size, split="test")
    ),
    "an image of fractions": Mistake("--dataset data", "data/train/dog/3.png", "save it with 8 or 16 bits", images(fractions)),
    "tiny images": Mistake("--dataset data", "3 x 3 pixels", "at least 4 are needed", tiny),
    "a truncated image met in training": Mistake(
        "--dataset data --cache none --normalize none --batch_size 2",
        "data/train/dog/3.png",
        "replace or remove it",
        images(lambda content: content[:60]),
        counts=(1,),  # two: by a real launcher, below
        trained=True,
    ),
    "a truncated image met by a data worker": Mistake(
        "--dataset data --cache none --normalize none --batch_size 2 --num_workers 1",
        "data/train/dog/3.png",
        "replace or remove it",
        images(lambda content: content[:60]),
        counts=(1,),  # two: by a real launcher, below
        trained=True,
    ),
    "a stream that is kept in memory": Mistake("--streaming --cache ram", "--streaming", "leave one of them out"),
    "a shuffle buffer of nothing": Mistake("--streaming --shuffle_buffer 0", "--shuffle_buffer must be at least 1", "at least 1"),
    "a stream of image files": Mistake(
        "--dataset data --streaming", "kept as 'imagefolder'", "leave --streaming out", images(lambda content: content)
    ),
    "a stream of a truncated file": Mistake(
        "--dataset data --streaming", "data/train.parquet cannot be read", "replace or remove it", truncated("train.parquet", 900)
    ),
    "a stream of files that differ": Mistake("--dataset data --streaming", "data/train-1.parquet", "save the files alike", other_names),
    "a stream without a test split": Mistake(
        "--dataset data --streaming", "no split to evaluate on", "(test, validation", without("test.parquet")
    ),
    "a truncated image met in a stream": Mistake(
        "--dataset data --streaming --normalize none --batch_size 2",
        "--dataset data: image 3 cannot be read",
        "replace or remove it",
        truncated_in_parquet,
        counts=(1,),  # two: as of any data
        trained=True,
    ),
    "a class unknown to the train split": Mistake(
        "--dataset data",
        "the train split lacks: fox",
        "remove them, or add images of them to the train split",
        images(lambda content: content, classes=("cat", "fox")),
    ),
    "a label unknown to the train split": Mistake(
        "--dataset data", "the train split lacks: 7", "remove them, or add images of them to the train split", labels([0, 7])
    ),
    "an image without a label": Mistake("--dataset data", "row 1 has no label", "every image of both splits needs one", labels([0, None])),
    "no label column": Mistake("--dataset data", "no label column", "its columns are 'image', 'score'", labels([0], label="score")),
    "fewer images than processes": Mistake("--dataset data", "1 images", "use fewer processes", data(train=1), counts=(2,)),
    # Checkpoints
    "resume from nowhere": Mistake("--resume nowhere", "--resume nowhere", "name a checkpoint, a run's folder, or auto"),
    "resume from a file": Mistake("--resume notes.txt", "--resume notes.txt", "name a checkpoint, a run's folder, or auto", a_file),
    "resume from a folder without checkpoints": Mistake(
        "--resume empty", "--resume empty", "name a checkpoint, a run's folder, or auto", lambda place: (place.folder / "empty").mkdir()
    ),
    "resume auto without a folder": Mistake("--resume auto --output_dir {none}", "--resume auto", "needs --output_dir"),
    "a truncated checkpoint by its name": Mistake(
        "--resume run/checkpoints/step_00000008", "model.safetensors has 100 bytes", "choose another, or --resume run", newest_truncated
    ),
    "all checkpoints broken": Mistake(
        "--resume auto --output_dir run", "optimizer.safetensors has 100 bytes", "remove the folder to start anew", all_truncated
    ),
    "a manifest that is no JSON": Mistake(
        "--resume run/checkpoints/step_00000008", "manifest.json is broken", "choose another, or --resume run", manifest("{{{")
    ),
    "a manifest of another form": Mistake(
        "--resume run/checkpoints/step_00000008",
        "manifest.json is broken",
        "choose another, or --resume run",
        manifest('{"files": [1, 2]}'),
    ),
    "no manifest": Mistake(
        "--resume run/checkpoints/step_00000008", "manifest.json is missing", "choose another, or --resume run", manifest(None)
    ),
    "another optimizer": Mistake(
        "--resume run --optimizer sgd",
        "--optimizer sgd",
        "was written with adamw: use that, or train anew in another --output_dir",
        Place.run,
    ),
    "another seed": Mistake(
        "--resume auto --output_dir run --seed 7", "--seed 7", "was written with 0: use that, or train anew", Place.run
    ),
    "another order": Mistake("--resume run --streaming", "--streaming True", "was written with False: use that", Place.run),
    "another normalize": Mistake("--resume run --normalize none", "--normalize none", "was written with dataset: use that", Place.run),
    "another model": Mistake(
        "--resume run",
        "--model convnet",
        "was written with vit: use that",
        changed("state.json", lambda state: state["config"].update(model="vit")),
    ),
    "other weights to start from": Mistake(
        "--resume run --weights run/model", "--weights run/model", "was written with none: use that, or train anew", Place.run
    ),
    "frozen in the middle": Mistake("--resume run --freeze backbone", "--freeze backbone", "was written with none: use that", Place.run),
    "other data": Mistake(
        "--dataset data --resume auto --output_dir run --epochs 3",
        "train 16 -> 24",
        "use that, or train anew in another --output_dir",
        other_data,
    ),
    "other weights": Mistake(
        "--resume auto --output_dir run",
        "step_00000008 does not fit this run",
        "choose another checkpoint",
        tensors_changed("model.safetensors", lambda tensors: tensors.pop("fc.weight")),
    ),
    "weights of another shape": Mistake(
        "--resume auto --output_dir run",
        "step_00000008 does not fit this run",
        "choose another checkpoint",
        tensors_changed("model.safetensors", lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 3)})),
    ),
    "an optimizer's state of other weights": Mistake(
        "--resume auto --output_dir run",
        "exp_avg/head.weight",
        "choose another checkpoint",
        tensors_changed("optimizer.safetensors", lambda tensors: tensors.update({"exp_avg/head.weight": torch.zeros(3)})),
    ),
    "a state without its position": Mistake(
        "--resume auto --output_dir run",
        "'train' is missing",
        "choose another checkpoint",
        changed("state.json", lambda state: state.pop("train")),
    ),
    "a state of a later version": Mistake(
        "--resume run", "version 99", "choose another checkpoint", changed("state.json", lambda state: state.update(version=99))
    ),
    "hooks that the trainer does not know": Mistake(
        "--resume auto --output_dir run",
        "Horoscope",
        "choose another checkpoint",
        changed("state.json", lambda state: state["hooks"].update(Horoscope={})),
    ),
    "a hostile pickle for weights": Mistake(
        "--resume auto --output_dir run", "step_00000008", "choose another checkpoint", hostile("model.safetensors")
    ),
    "a hostile pickle of torch for weights": Mistake(
        "--resume auto --output_dir run", "step_00000008", "choose another checkpoint", hostile_torch_file
    ),
    "a hostile pickle for a rank's generators": Mistake(
        "--resume run/checkpoints/step_00000008", "step_00000008", "choose another checkpoint", hostile("rank_0.safetensors")
    ),
    "a hostile pickle for the state": Mistake(
        "--resume run/checkpoints/step_00000008", "step_00000008", "choose another checkpoint", hostile("state.json")
    ),
    "a checkpoint outside of a run": Mistake(
        "--resume backup/step_00000008 --output_dir {none}", "backup/step_00000008", "add --output_dir", moved_checkpoint
    ),
    # Folders, disks, permissions
    "an empty output_dir": Mistake('--output_dir ""', "--output_dir must not be empty", "give it a value, or leave it out"),
    "a folder that holds a run": Mistake(
        "--output_dir run",
        "--output_dir run holds a run already",
        "go on with it by --resume auto, or choose another --output_dir",
        Place.run,
    ),
    "resume into a folder that holds another run": Mistake(
        "--resume run/checkpoints/step_00000004 --output_dir other",
        "--output_dir other holds a run already",
        "choose another --output_dir",
        lambda place: shutil.copytree(place.run(), place.folder / "other"),
    ),
    "a file for a folder": Mistake("--output_dir notes.txt", "--output_dir notes.txt", "choose another --output_dir", a_file),
    "a folder under a file": Mistake("--output_dir notes.txt/run", "--output_dir notes.txt/run", "choose another --output_dir", a_file),
    "a folder where none can be": Mistake("--output_dir /proc/nowhere", "--output_dir /proc/nowhere", "choose another --output_dir"),
    "a name too long": Mistake(f"--output_dir new/{'x' * 300}", "File name too long", "choose another --output_dir"),
    "a read-only disk": Mistake("--output_dir disk/new/run", "Read-only", "choose another --output_dir", mounted("size=1m,ro")),
    "a full disk": Mistake("--output_dir disk/new/run", "no space left on the disk", "free some", mounted("size=1m,nr_inodes=4"), code=1),
    "a folder in a file's way": Mistake("--output_dir run", "--output_dir run", "choose another --output_dir", folder_in_the_way),
    # Environment: precision, launchers, ports
    "fp16 on a CPU by the flag": Mistake("--mixed_precision fp16", "fp16 needs a GPU", "use --mixed_precision bf16 or no"),
    "fp16 on a CPU by the launcher": Mistake(
        "", "fp16 needs a GPU", "use --mixed_precision bf16 or no", variables={"ACCELERATE_MIXED_PRECISION": "fp16"}
    ),
    "fp8": Mistake("", "fp8 cannot run here", "use --mixed_precision bf16 or no", variables={"ACCELERATE_MIXED_PRECISION": "fp8"}),
    "a precision that is none": Mistake("", "'fp64'", "no, fp16, bf16, fp8", variables={"ACCELERATE_MIXED_PRECISION": "fp64"}),
    "a dynamo backend that is none": Mistake("", "'turbo'", "ACCELERATE_DYNAMO_BACKEND", variables={"ACCELERATE_DYNAMO_BACKEND": "turbo"}),
    "restarts that begin anew": Mistake(
        "", "--max_restarts", "add --resume auto and --output_dir", variables={"TORCHELASTIC_MAX_RESTARTS": "3"}
    ),
    "two accumulations": Mistake(
        "", "4 gradient accumulation steps", "give --gradient_accumulation_steps", variables={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    ),
    "an accumulation that is no number": Mistake(
        "", "'some'", "correct or unset it", variables={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "some"}
    ),
    **{
        engine: Mistake("", f"{engine} is not supported", "launch with a file of accelerate_configs/", variables={variable: "true"})
        for variable, engine in REFUSED_ENGINES.items()
    },
    "LOCAL_WORLD_SIZE that is no number": Mistake(
        "", "LOCAL_WORLD_SIZE", "correct or unset it", variables={"LOCAL_WORLD_SIZE": "all"}, by_each=True
    ),
    "WORLD_SIZE that is no number": Mistake("", "WORLD_SIZE", "correct or unset it", variables={"WORLD_SIZE": "two"}, by_each=True),
    "WORLD_SIZE of nobody": Mistake("", "RANK and LOCAL_RANK", "`accelerate launch` or `torchrun`", variables=NOBODY, by_each=True),
    "WORLD_SIZE of zero": Mistake("", "WORLD_SIZE", "at least 1", variables={"WORLD_SIZE": "0"}, by_each=True),
    "RANK out of range": Mistake("", "RANK is 7", "ranks go from 0 to 1", variables={**rank_environment(7, 2, 1)}, by_each=True),
    "RANK that is no number": Mistake("", "RANK", "correct or unset it", variables={"RANK": "first"}, by_each=True),
    "LOCAL_RANK that is no number": Mistake(
        "", "LOCAL_RANK", "correct or unset it", variables={"LOCAL_RANK": "first"}, by_each=True, counts=(2,)
    ),
    "MASTER_PORT that is no number": Mistake(
        "", "MASTER_PORT", "correct or unset it", variables={"MASTER_PORT": "http"}, by_each=True, counts=(2,)
    ),
    "MASTER_PORT out of range": Mistake(
        "", "MASTER_PORT is 99999", "between 1 and 65535", variables={"MASTER_PORT": "99999"}, by_each=True, counts=(2,)
    ),
    "a port in use": Mistake(
        "", "the port of 127.0.0.1:{MASTER_PORT} is in use", "--main_process_port", taken_port, variables=ALONE_OF_TWO, counts=(1,)
    ),
}


@dataclass(frozen=True)
class Answer:
    """How the command ended on one rank."""

    code: int
    output: str
    errors: str


def command(folder: Path, argv: list[str]) -> Answer:
    """`main(argv)` in `folder`, in this process, with what it, and C++ below it, writes into the two standard files."""
    before = Path.cwd()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = {number: os.dup(number) for number in (1, 2)}
        os.chdir(folder)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code: Any = 0
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in kept.items():
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(before)
        out.seek(0)
        err.seek(0)
        return Answer(code, out.read().decode(), err.read().decode())


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every folder and file in `folder`, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("ids"), 16, 8)


def alone(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """The environment of a process that no launcher started."""
    return {**dict.fromkeys(LAUNCHERS_VARIABLES), **variables}


@pytest.fixture(scope="module")
def trained(one_rank: Ranks, ids: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the mistakes with checkpoints are made on; that it trains shows that nothing here fails everything. bf16 is no mistake."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--dataset", str(ids), "--output_dir", "run", "--epochs", "2", "--batch_size", "4", "--mixed_precision", "bf16"]
    (answer,) = one_rank.run_apart(command, folder, flags, environment=alone({}))
    assert answer.code == 0, answer.errors
    assert answer.errors == ""
    assert [path.name for path in listed(folder / "run" / "checkpoints")] == ["step_00000004", "step_00000008"]
    return folder / "run"


def argv(mistake: Mistake, place: Place) -> list[str]:
    flags = shlex.split(mistake.flags.replace("--output_dir {none}", "").format(ids=place.ids))
    if not {"--dataset", "--data_dir"} & set(flags):
        flags += ["--dataset", str(place.ids)]
    if "--output_dir" not in mistake.flags:
        flags += ["--output_dir", "out"]
    return flags


def sentences(errors: str) -> list[str]:
    return re.findall(r"\berror(?: on rank \d+)?: .*", errors)


def assert_answered(mistake: Mistake, place: Place, answers: list[Answer]) -> None:
    """The right code on all ranks, one sentence in all from the main process, and nothing else."""
    everything = "".join(answer.errors + answer.output for answer in answers)
    assert {answer.code for answer in answers} == {mistake.code}, everything
    assert "Traceback" not in everything
    assert 'File "' not in everything
    for number, answer in enumerate(answers):
        lines = answer.errors.splitlines()
        assert len(lines) == (number == 0 or mistake.by_each), everything
        for line in lines:
            assert re.match(r"error(?: on rank \d+)?: " if mistake.by_each else "error: ", line), everything
            assert mistake.thing.format(**place.variables) in line
            assert mistake.mend in line
        if not mistake.trained:
            assert answer.output == "", "nothing was begun"


def assert_a_whole_run(folder: Path, mistake: Mistake) -> None:
    """What a run leaves that ended by an error before its first checkpoint."""
    end = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
    assert (end["code"], end["resumable"]) == (mistake.code, False)
    assert mistake.thing in end["reason"]
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "env.json",
        "classes.json",
        "plan.json",
        "train.log",
        "metrics.jsonl",
        "exit.json",
    }


@pytest.mark.parametrize(("name", "count"), [(name, count) for name, mistake in MISTAKES.items() for count in mistake.counts])
def test_mistakes(one_rank: Ranks, two_ranks: Ranks, ids: Path, trained: Path, tmp_path: Path, name: str, count: int) -> None:
    mistake = MISTAKES[name]
    with ExitStack() as later:
        place = Place(tmp_path, ids, trained, later=later)
        mistake.setup(place)
        before = snapshot(tmp_path)
        variables = {key: value and value.format(**place.variables) for key, value in mistake.variables.items()}
        ranks, environment = (one_rank, alone(variables)) if count == 1 else (two_ranks, variables)
        answers = ranks.run_apart(command, tmp_path, argv(mistake, place), environment=environment)
        assert_answered(mistake, place, answers)
        assert not (tmp_path / "executed").exists(), "a pickle was loaded"
        after = snapshot(tmp_path)
        if mistake.trained:
            assert_a_whole_run(tmp_path / "out", mistake)
            after = {path: content for path, content in after.items() if path.split("/")[0] != "out"}
        assert after == before


# Two of them are met in training, by one rank alone, while the other one is in a collective: it may have to end its process.
LAUNCHED = (
    "unknown flag",
    "a batch that cannot be divided",
    "a truncated image",
    "a truncated image met in training",
    "a truncated image met by a data worker",
    "all checkpoints broken",
    "a folder that holds a run",
)


@pytest.mark.parametrize("name", LAUNCHED)
def test_mistakes_with_a_real_launcher(ids: Path, trained: Path, tmp_path: Path, name: str) -> None:
    mistake, place = MISTAKES[name], Place(tmp_path, ids, trained)
    mistake.setup(place)
    before = snapshot(tmp_path)
    launcher = (*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml")
    with started(*launcher, MAIN, *argv(mistake, place), cwd=tmp_path) as child:
        launched = finish(child, tmp_path / "out")
    assert launched.code == 1, "the launcher's, whatever the worker's"
    assert launched.frames() == [], launched.errors
    (sentence,) = launched.sentences()
    assert mistake.thing in sentence
    assert mistake.mend in sentence
    after = snapshot(tmp_path)
    if mistake.trained:
        assert_a_whole_run(tmp_path / "out", mistake)
        after = {path: content for path, content in after.items() if path.split("/")[0] != "out"}
    else:
        assert launched.lines == []
    assert after == before


def test_a_hostile_pickle_in_a_model_folder(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / "model", tmp_path / "model"))
    assert read_model(folder)[1]["classes"] == [str(number) for number in range(10)]
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(payload)
        with pytest.raises(UserError, match=f"^the model folder {folder} cannot be loaded: .*: name another run's$"):
            read_model(folder)
        assert not (tmp_path / "executed").exists()
    pickle.loads(payload)
    assert (tmp_path / "executed").is_dir(), "that it would show"


def test_a_mistake_is_found_out(ids: Path, tmp_path: Path) -> None:
    """What the table's tests must not let pass."""
    mistake, place = Mistake("--epochs 0", "but is 0", "at least 1"), Place(tmp_path, ids, ids)
    right = "error: --epochs must be at least 1, but is 0\n"
    good, silent = Answer(2, "", right), Answer(2, "", "")
    assert_answered(mistake, place, [good, silent])
    for answers in (
        [silent, silent],
        [good, good],
        [silent, good],
        [good, Answer(1, "", "")],
        [Answer(1, "", right), Answer(1, "", "")],
        [Answer(2, "", right + right), silent],
        [Answer(2, "", "Traceback (most recent call last):\n" + right), silent],
        [Answer(2, "", "error: epochs\n"), silent],
        [Answer(2, " train  epoch 1/2\n", right), silent],
    ):
        with pytest.raises(AssertionError):
            assert_answered(mistake, place, answers)
    (tmp_path / "out").mkdir()
    assert snapshot(tmp_path) == {"out": b""}


def test_the_table_is_long_and_wide() -> None:
    assert len(MISTAKES) >= 45
    assert sum(mistake.counts == (1, 2) for mistake in MISTAKES.values()) >= 45
