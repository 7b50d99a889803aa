"""What the user reads: the block before training, log lines, train.log, the same as numbers; once, from the main process."""

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from trainer.accelerator import describe_precision
from trainer.comm_hooks import describe_communication
from trainer.config import Config
from trainer.data.row_groups import StreamedRows
from trainer.data.transforms import MEASURED
from trainer.files import flush, write_json
from trainer.hooks.base import Hook
from trainer.metrics import named
from trainer.record import PLAN
from trainer.state import Run


class Log(Hook):
    """Prints, and writes the same lines to train.log and the same numbers to metrics.jsonl, each flushed at once.

    A training line covers the updates since the one before: the mean loss over all ranks' images, images per second, and the share
    of the time that the main process waited for data.
    """

    lines: IO[str]
    numbers: IO[str]

    def __init__(self) -> None:
        self.entries = 0
        self.seconds = self.train_seconds = 0.0
        self.training_since: float | None = None
        self.fit_start = time.perf_counter()
        self.startup_seconds: float | None = None

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            self.lines = (run.output_dir / "train.log").open("a", encoding="utf-8")
            self.numbers = reopen(run.output_dir / "metrics.jsonl", self.entries)
            run.processes.at_exit.append(self.close)
            if run.on_entry is not None:
                for line in Path(self.numbers.name).read_text(encoding="utf-8").splitlines():
                    run.on_entry(json.loads(line))
            plan = describe(run)
            write_json(run.output_dir / PLAN, plan)
            for key, value in plan:
                self.print(f"{key:>10} {value}")
        self.fit_start = self.start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """What metrics.jsonl has in it, and the time up to here, also before a resume."""
        if self.entries:
            flush(Path(self.numbers.name))
        return {"entries": self.entries, "seconds": self.elapsed(), "train_seconds": self.trained()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries, self.seconds, self.train_seconds = state["entries"], state["seconds"], state["train_seconds"]

    def elapsed(self) -> float:
        """Seconds of training and evaluation so far, with those before a resume."""
        return self.seconds + time.perf_counter() - self.fit_start

    def on_epoch_start(self, run: Run) -> None:
        self.start = self.training_since = time.perf_counter()

    def on_step_end(self, run: Run) -> None:
        if self.startup_seconds is None:
            self.startup_seconds = time.time() - psutil.Process().create_time()
        self.print_notes(run)
        if run.state.step % run.config.log_interval == 0:
            self.log_training(run)

    def on_eval_start(self, run: Run) -> None:
        self.log_training(run)
        self.train_seconds, self.training_since = self.trained(), None
        self.eval_start = time.perf_counter()

    def trained(self) -> float:
        """Seconds of training alone, with those of the epoch in progress."""
        return self.train_seconds + (time.perf_counter() - self.training_since if self.training_since is not None else 0.0)

    def log_training(self, run: Run) -> None:
        """One training line. A collective: every rank calls it at the same step."""
        run.at("log")
        state, window = run.state, run.window
        total = window.sum_up()
        sums = torch.stack([total, torch.full_like(total, window.samples), window.bad.double()])
        loss, samples, bad = run.accelerator.reduce(sums, "sum").tolist()
        state.bad_images += round(bad)
        # All ranks know it now: what one of them has in its window, after a resume on more processes, the others need not have.
        if not samples:
            return
        now = time.perf_counter()
        seconds = max(now - self.start, 1e-9)
        if run.is_main:
            per_step = (now - self.fit_start) / max(1, state.step - run.first_step)
            entry = {
                "event": "train",
                "epoch": state.epoch + 1,
                "step": state.step,
                "samples": state.samples,
                "loss": loss / samples,
                "lr": run.optimizer.param_groups[0]["lr"],
                "images_per_second": samples / seconds,
                "data_fraction": min(1.0, window.waited / seconds),
                "grad_norm": float(window.grad_norm) if window.grad_norm is not None else None,
                "scale": state.loss_scale,
                "skipped": state.skipped,
                "bad_images": state.bad_images,
            }
            self.record(run, entry)
            line = (
                f"train epoch {entry['epoch']}/{run.config.epochs} step {state.step}/{run.total_steps} loss {entry['loss']:.4f} "
                f"lr {entry['lr']:.1e} {entry['images_per_second']:.0f} img/s data {100 * entry['data_fraction']:.0f}%"
            )
            if entry["grad_norm"] is not None:
                line += f" norm {entry['grad_norm']:.3g}"
            if state.loss_scale is not None:
                line += f" scale {state.loss_scale:g}"
            if state.skipped:
                line += f" skipped {state.skipped}"
            if state.bad_images:
                line += f" bad {state.bad_images}"
            left = round(per_step * max(0, run.total_steps - state.step))
            self.print(f"{line} eta {left // 60}:{left % 60:02d}")
        window.clear()
        self.start = time.perf_counter()

    def on_epoch_end(self, run: Run) -> None:
        if not run.is_main:
            return
        state, metrics = run.state, run.state.metrics
        best = state.best
        self.record(
            run,
            {
                "event": "eval",
                "epoch": state.epoch,
                "step": state.step,
                **{key: metrics[key] for key in ("acc1", "acc5", "loss", "ece", "samples", "bad_images")},
                "best_acc1": best["acc1"],
                "best_epoch": best["epoch"],
                "seconds": time.perf_counter() - self.eval_start,
            },
        )
        self.print(
            f"eval  epoch {state.epoch}/{run.config.epochs} acc1 {metrics['acc1']:.2f} acc5 {metrics['acc5']:.2f} "
            f"loss {metrics['loss']:.4f} samples {metrics['samples']}/{len(run.data.test)} "
            f"best {best['acc1']:.2f} (epoch {best['epoch']})" + f" bad {metrics['bad_images']}" * bool(metrics["bad_images"])
        )

    def on_fit_end(self, run: Run) -> None:
        if not run.is_main:
            return
        self.print_notes(run)
        state, best = run.state, run.state.best
        seconds = self.elapsed()
        write_json(
            run.output_dir / "results.json",
            {
                "acc1": state.metrics["acc1"],
                "acc5": state.metrics["acc5"],
                "loss": state.metrics["loss"],
                "best_acc1": best["acc1"],
                "best_loss": best["loss"],
                "best_epoch": best["epoch"],
                "ema_decay": run.config.ema_decay,
                "best_picked_on": f"the split '{run.data.test_split}' that it is measured on, so it is an optimistic figure",
                "evaluated_samples": state.metrics["samples"],
                "epochs": state.epoch,
                "step": state.step,
                "samples": state.samples,
                "skipped": state.skipped,
                "bad_images": state.bad_images + state.metrics["bad_images"],
                "scale": state.loss_scale,
                "seconds": seconds,
                "train_seconds": self.train_seconds,
                "startup_seconds": self.startup_seconds,
                **named(state.metrics, run.data.classes),
            },
        )
        self.print(
            f"done  {state.epoch} epochs, {state.step} updates in {seconds:.1f} s: acc1 {state.metrics['acc1']:.2f}, "
            f"best {best['acc1']:.2f} (epoch {best['epoch']}, picked on the split '{run.data.test_split}'); "
            f"model in {run.output_dir / 'model'}" + f", report in {run.output_dir / 'report.html'}" * run.config.report
        )

    def close(self, code: int, reason: str) -> None:
        for file in (self.lines, self.numbers):
            # On a full disk, what could not be written fails once more.
            with suppress(OSError):
                file.close()

    def on_interrupt(self, run: Run) -> None:
        if run.is_main:
            self.print_notes(run)
            self.print(f"stop  {run.state.interrupted}: epoch {run.state.epoch + 1}, update {run.state.step}; writing a checkpoint")

    def print_notes(self, run: Run) -> None:
        while run.notes and run.is_main:
            self.print(run.notes.pop(0))

    def print(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError:
            # Whoever read stdout (a pipe, a terminal that was closed) has gone; the run goes on, and so does train.log.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(line, file=self.lines, flush=True)

    def record(self, run: Run, entry: dict[str, Any]) -> None:
        self.entries += 1
        # NaN is no JSON.
        entry = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()}
        print(json.dumps(entry), file=self.numbers, flush=True)
        if run.on_entry is not None:
            run.on_entry(entry)


def reopen(path: Path, entries: int) -> IO[str]:
    """The file at the end of its first `entries` lines; what follows them, a torn line too, is cut off."""
    file = path.open("a+", encoding="utf-8")
    file.seek(0)
    end = 0
    for _ in range(entries):
        if not file.readline().endswith("\n"):
            break
        end = file.tell()
    file.truncate(end)
    return file


def describe_optimizer(config: Config) -> str:
    text = f"{config.optimizer}, weight decay {config.weight_decay:g}"
    if config.optimizer in ("sgd", "rmsprop"):
        text += f", {'Nesterov ' if config.nesterov else ''}momentum {config.momentum:g}"
    return text + ("" if config.weight_decay_1d else ", no decay of biases and normalisation weights")


def describe_extras(config: Config) -> list[tuple[str, str]]:
    """Rows of what is not everybody's."""
    mixes = [f"{name} alpha {alpha:g}" for name, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)) if alpha]
    loss = [f"label smoothing {config.label_smoothing:g}"] if config.label_smoothing else []
    loss += [" or ".join(mixes)] if mixes else []
    rows = [("loss", ", ".join(loss))] if loss else []
    if config.ema_decay is not None:
        rows.append(("ema", f"decay {config.ema_decay:g}: accuracy, loss and the exported model are those of the averaged weights"))
    return rows


def place_of_images(run: Run) -> str:
    images = run.data.train.images
    if images is None:
        return "streamed" if run.config.streaming else "decoded each time"
    return "decoded once into memory" if images.device.type == "cpu" else f"decoded once onto {images.device}"


def count_parameters(run: Run) -> str:
    """All parameters, and those that are trained where it is not all."""
    parameters = list(run.module.parameters())
    total, trained = (sum(parameter.numel() for parameter in some) for some in (parameters, [p for p in parameters if p.requires_grad]))
    return f"{total:,} parameters" if trained == total else f"{trained:,} of {total:,} parameters trained"


def describe_images(run: Run) -> str:
    """How images become what the model takes, and what its normalisation rests on."""
    config, text = run.config, run.data.about
    if config.normalize == "dataset":
        number = min(MEASURED, len(run.data.train))
        text += f"; mean and deviation of {'all' if number == len(run.data.train) else f'{number:,} evenly spread'} training images"
    augment = [f"augmented ({config.augment})"] if config.augment != "none" else []
    augment += [f"random erasing {config.random_erasing:g}"] if config.random_erasing else []
    text += "".join(f"; {part}" for part in augment)
    return text + ("; what cannot be read is skipped" if config.on_bad_image == "skip" else "")


def describe(run: Run) -> list[tuple[str, str]]:
    """What will happen, as (name, value) lines."""
    config, plan, accelerator = run.config, run.plan, run.accelerator
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads a process"
    processes = f"{run.processes.count}" + (f", backend {run.processes.state.backend}" if run.processes.control is not None else "")
    plugin = accelerator.state.dynamo_plugin
    dynamo = plugin.backend.value.lower()
    shape = " x ".join(map(str, run.data.train.shape))
    comm = describe_communication(config, run.processes.count, run.shared_gradients)
    rows = [
        ("device", name),
        ("processes", processes),
        ("precision", describe_precision(accelerator) + (", TF32" if config.tf32 else "")),
        ("format", "channels last" if run.normalize.memory_format is torch.channels_last else "channels first"),
        ("sync_bn", f"on ({run.sync_bn_layers} layers)" if run.sync_bn_layers else "off"),
        ("compile", f"dynamo backend {dynamo}" + f", {plugin.mode}" * (plugin.mode != "default") if dynamo != "no" else "no"),
        (
            "data",
            f"{config.data_name}: {len(run.data.train)} train / {len(run.data.test)} {run.data.test_split}, "
            f"{len(run.data.classes)} classes, "
            f"images {shape}, {place_of_images(run)}",
        ),
        ("images", describe_images(run)),
        ("model", f"{config.model}, {count_parameters(run)}"),
        ("weights", run.weights),
        (
            "batch",
            f"{plan.batch_size} a process x {plan.processes} processes x {plan.accumulation} accumulation "
            f"= global batch {plan.global_batch_size}",
        ),
        *([("auto batch", run.data.fitted)] if run.data.fitted is not None else []),
        ("updates", f"{run.total_steps} ({plan.updates} an epoch, {config.epochs} epochs)"),
        ("optimizer", describe_optimizer(config)),
        ("lr plan", str(run.lr_plan)),
        *([("comm", comm)] if comm is not None else []),
        *describe_extras(config),
        ("output", str(run.output_dir)),
        *([("trackers", ", ".join(config.trackers))] if config.trackers else []),
        *(("resume", note) for note in run.resume_notes),
    ]
    stream = run.data.train.rows
    if isinstance(stream, StreamedRows):
        streaming = (
            f"{len(stream.files)} files, {len(stream.sizes)} row groups; a loading process keeps at most "
            f"{min(len(stream), stream.capacity)} images ({stream.nbytes(stream.capacity) / 1e6:.0f} MB)"
        )
        rows.insert([name for name, _ in rows].index("data") + 1, ("streaming", streaming))
    if plan.dropped:
        rows.append(("note", f"{plan.dropped} images of each epoch are left out: the last batch has fewer than {plan.processes} processes"))
    return rows
