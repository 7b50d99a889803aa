"""A script as the tutorials write it, by hand, on DistributedDataParallel or on Accelerate; right, or with one thing forgotten."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainer.checks.report import Report
from trainer.doctor import inspect
from trainer.models import sync_batchnorm
from trainer.runtime import Processes

TRAIN, TEST = 65, 33


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Float (1, 8, 8) noise and a class of ten that depends on it."""

    def __init__(self, count: int, augment: str = "", broken: tuple[int, ...] = ()) -> None:
        self.images = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(count))
        self.labels = (self.images.mean((1, 2, 3)) * 40).int().remainder(10).long()
        self.augment = augment
        self.broken = broken

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.broken:
            raise OSError(f"picture_{index}.png is truncated")
        image = self.images[index]
        if self.augment == "torch":
            image = image + torch.rand(())
        elif self.augment == "numpy":
            image = image + float(numpy.random.rand())
        elif self.augment == "random":
            image = image + random.random()
        return image, self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def same_numpy_seed(worker: int) -> None:
    numpy.random.seed(0)


class Script:
    """Everything that a script hands to `inspect`, as `arguments`.

    Args:
        forgotten: what it does wrong; empty for nothing.
        options: `augment`, `workers`, `fp16`, `accelerate`, `dropout`.
    """

    def __init__(self, processes: Processes, folder: Path, forgotten: str, **options: Any) -> None:
        rank, count = processes.rank, processes.count
        self.rank, self.count, self.forgotten = rank, count, forgotten
        torch.manual_seed(0)
        module = network()
        if options.get("dropout"):
            module.insert(4, nn.Dropout(0.5))  # type: ignore[operator]
        other = network()
        if forgotten != "BatchNorm unconverted":
            sync_batchnorm.convert(module)
        self.module = module
        self.optimizer: Any = torch.optim.SGD((other if forgotten == "optimizer of another model" else module).parameters(), 0.1, 0.9)
        self.model: Any = module if forgotten == "model not wrapped" else DistributedDataParallel(module)
        if forgotten == "one rank's weights changed" and rank == 1:
            with torch.no_grad():
                module.get_parameter("0.weight").mul_(1.001)
        torch.manual_seed(0 if forgotten == "same seed on all ranks" else 1000 * rank)
        numpy.random.seed(0 if forgotten == "same seed on all ranks" else rank)
        random.seed(0 if forgotten == "same seed on all ranks" else rank)

        train = Pictures(TRAIN, options.get("augment", ""), (4, 64) if forgotten == "broken images" else ())
        test = Pictures(TEST)
        workers = options.get("workers", 0)
        self.sampler: Any = DistributedSampler(train, count, rank, shuffle=forgotten != "no shuffle")
        if forgotten == "uneven shards":
            self.sampler = list(range(rank, TRAIN, count))
        loading: dict[str, Any] = {"batch_size": 8, "sampler": self.sampler, "num_workers": workers}
        if workers:
            # A rank of the tests was spawned, and would spawn its workers too, seconds each.
            loading["multiprocessing_context"] = "fork"
        if forgotten == "no DistributedSampler":
            loading = {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
        if forgotten == "each rank shuffles for itself":
            self.sampler = DistributedSampler(train, count, rank, seed=rank)
            loading = {"batch_size": 8, "sampler": self.sampler}
        if forgotten == "same seed in all workers":
            loading["worker_init_fn"] = same_numpy_seed
        self.train_loader: Any = DataLoader(train, **loading)
        # A DistributedSampler would fill up the last batch with an image that then counts twice.
        padded: Any = DistributedSampler(test, count, rank, shuffle=False)
        self.eval_loader: Any = DataLoader(
            test, batch_size=8, sampler=padded if forgotten == "padding counted" else range(rank, TEST, count)
        )
        self.scaler = torch.amp.GradScaler("cpu") if options.get("fp16") and forgotten != "fp16 without scaler" else None
        self.autocast = bool(options.get("fp16")) and forgotten != "no autocast"
        start_epoch: Callable[[int], Any] | None = self.sampler.set_epoch if hasattr(self.sampler, "set_epoch") else lambda epoch: None
        self.arguments: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "train_loader": self.train_loader,
            "eval_loader": self.eval_loader,
            "scaler": self.scaler,
            "precision": "fp16" if options.get("fp16") else "no",
            "forward": self.forward,
            "start_epoch": None if forgotten == "set_epoch" else start_epoch,
            "train_step": self.train_step,
            "evaluate": self.evaluate,
            "save": self.save,
            "load": self.load,
            "folder": folder,
        }

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.forgotten == "forward through the plain model":
            model = self.module
        with torch.autocast("cpu", torch.float16, enabled=self.autocast):
            return model(batch[0]), batch[1]

    def train_step(self, batch: tuple[Tensor, Tensor]) -> None:
        loss = F.cross_entropy(*self.forward(self.model, batch))
        if self.scaler is not None and self.forgotten != "scaler skipped":
            self.scaler.scale(loss).backward()
            if self.forgotten == "scaled, but stepped without the scaler":
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, ...] | None:
        if self.forgotten == "evaluation on rank 0 only" and self.rank != 0:
            return None
        self.module.eval()
        right, seen, loss = torch.zeros(3, dtype=torch.float64)
        for images, labels in self.eval_loader:
            logits = self.module(images)
            right += (logits.argmax(1) == labels).sum()
            seen += len(labels)
            loss += F.cross_entropy(logits, labels, reduction="sum")
        totals = torch.stack([right, seen, loss])
        if self.forgotten not in ("evaluation on rank 0 only", "metrics of each rank"):
            dist.all_reduce(totals)
        if self.forgotten == "metrics reduced per rank":
            rate = right / seen
            dist.all_reduce(rate)
            return float(rate / self.count * TEST), TEST
        if self.forgotten == "loss averaged over batches":
            return float(totals[0]), float(totals[1]), float(totals[2]) / len(self.eval_loader)
        return float(totals[0]), float(totals[1]), float(totals[2] / totals[1])

    def save(self, folder: Path) -> None:
        if self.forgotten == "an error on one rank" and self.rank == 1:
            raise OSError("no space left")
        if self.rank == (self.forgotten == "the wrong rank saves") or self.forgotten == "saving on all ranks":
            optimizer = self.optimizer.state_dict() if self.forgotten != "optimizer not saved" else None
            torch.save({"module": self.module.state_dict(), "optimizer": optimizer}, folder / "model.pt")

    def load(self, folder: Path) -> None:
        content = torch.load(folder / "model.pt")
        if self.forgotten != "weights not loaded":
            self.module.load_state_dict(content["module"])
        if content["optimizer"] is not None:
            self.optimizer.load_state_dict(content["optimizer"])


class AccelerateScript(Script):
    """The same on Accelerate."""

    def __init__(self, processes: Processes, folder: Path, forgotten: str, **options: Any) -> None:
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        super().__init__(processes, folder, "model not wrapped", **options)
        self.forgotten = forgotten
        self.accelerator = Accelerator(cpu=True)
        train = Pictures(TRAIN, options.get("augment", ""))
        set_seed(0)
        loading: dict[str, Any] = {"shuffle": True}
        if forgotten == "a second DistributedSampler":
            loading = {"sampler": DistributedSampler(train, self.count, self.rank)}
        self.model, self.optimizer, self.train_loader, self.eval_loader = self.accelerator.prepare(
            self.module, self.optimizer, DataLoader(train, 8, **loading), DataLoader(Pictures(TEST), 8)
        )
        if forgotten == "loader not prepared":
            self.train_loader = DataLoader(train, 8, shuffle=True)
        set_seed(0, device_specific=True)
        self.arguments |= {
            "model": self.model,
            "optimizer": self.optimizer,
            "train_loader": self.train_loader,
            "eval_loader": self.eval_loader,
            "accelerator": self.accelerator,
            "start_epoch": self.train_loader.set_epoch if hasattr(self.train_loader, "set_epoch") else None,
        }

    def train_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.accelerator.backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, ...] | None:
        self.model.eval()
        right = seen = 0
        for images, labels in self.eval_loader:
            predictions = self.model(images).argmax(1)
            gather = self.accelerator.gather if self.forgotten == "gather" else self.accelerator.gather_for_metrics
            predictions, labels = gather((predictions, labels))
            right += int((predictions == labels).sum())
            seen += len(labels)
        return right, seen

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


def examined(processes: Processes, folder: Path, forgotten: str, options: dict[str, Any], environment: dict[str, str]) -> Report:
    """The report on a script that has forgotten something, on this rank."""
    os.environ.update(environment)
    make = AccelerateScript if options.get("accelerate") else Script
    script = make(processes, folder, forgotten, **options)
    if forgotten != "room on the disk":
        return inspect(**script.arguments)
    usage = shutil.disk_usage(folder)
    with patch.object(shutil, "disk_usage", lambda path: usage._replace(free=20_000)):
        return inspect(**script.arguments)
