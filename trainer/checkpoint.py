"""Checkpoints: all that a run needs to go on as if nothing had happened; written whole, verified, loaded without executing anything.

    output_dir/checkpoints/step_00001200/
      model.safetensors       weights and buffers
      ema.safetensors         averaged weights, with --ema_decay
      optimizer.safetensors   KIND/PARAMETER, for example exp_avg/fc.weight
      rank_0.safetensors …    generators, the sums since the last log line, and PowerSGD's memories, of each rank
      state.json              TrainState, GradScaler, hooks, config, processes, plan, what the data were
      best/                   output_dir/model as it was
      manifest.json           size and SHA-256 of each file; written last

Accelerate's save_state is not used: it executes pickles when it loads, leaves the position in the epoch out, and is not atomic.
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.agreement import await_checkpoint, check_tensors, newest_checkpoint
from trainer.config import Config
from trainer.export import MODEL, contiguous, copied, take_over, write_tensors
from trainer.files import MANIFEST, beside, problem, recover_folder, replace_folder, write_json, write_manifest
from trainer.models.weights import load_tensors
from trainer.optim import plan_lr
from trainer.runtime import Processes, RunError, UserError, disk_full
from trainer.seeding import generator_states
from trainer.state import Run, TrainState, planned_steps

CHECKPOINTS, SET_ASIDE = "checkpoints", "set_aside"
VERSION = 1
NAME = re.compile(r"step_\d+")
# Another value makes the checkpoint useless: the weights or the optimizer's state would not fit, or the order of the epoch not be the same.
FIXED = ("model", "weights", "freeze", "optimizer", "seed", "normalize", "streaming", "shuffle_buffer")
# Says where, not what, is trained.
INCIDENTAL = ("output_dir", "resume_from_checkpoint", "push_to_hub")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory, on the CPU.

    Attributes:
        path: its folder.
        model, optimizer: tensors by name.
        ema: averaged weights by name; empty without.
        ranks: each rank's tensors.
        state: state.json.
        notes: sentences about the search for it.
    """

    path: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ema: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]
    state: dict[str, Any]
    notes: list[str]

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run that wrote it; None when it was copied away."""
        return run_folder(self.path)


def run_folder(path: Path) -> Path | None:
    """The folder of the run that a checkpoint's path is in; None when it is in none."""
    # As it was written, where that tells: it will stand in messages.
    for place in (path, Path(os.path.abspath(path))):
        parent = place.parent.parent if place.parent.name == SET_ASIDE else place.parent
        if parent.name == CHECKPOINTS:
            return parent.parent
    return None


# Writing


def save(run: Run, hooks: dict[str, dict[str, Any]]) -> None:
    """Begin to write output_dir/checkpoints/step_N, after which the oldest beyond --save_total_limit go. A collective.

    The state is copied here; the main process writes it while the training goes on. `await_checkpoint` waits for the end.

    Args:
        hooks: the hooks' states, by class name.

    Raises:
        RunError: a weight or a buffer is not finite, or the checkpoint before could not be written.
    """
    await_checkpoint(run)
    window = {"window_loss": run.window.sum_up().cpu().clone(), "window_samples": torch.tensor(run.window.samples)}
    window["window_bad"] = run.window.bad.detach().cpu().clone()
    if run.window.grad_norm is not None:
        window["window_grad_norm"] = run.window.grad_norm.detach().cpu().clone()
    memories = run.power_sgd.state() if run.power_sgd is not None else {}
    ranks = run.processes.gather(generator_states(run.accelerator.device) | window | memories)
    folder = run.output_dir / CHECKPOINTS / f"step_{run.state.step:08d}"
    with run.processes.together():
        if run.is_main:
            check_tensors(run)
            files = {"model": contiguous(run.module), "optimizer": optimizer_tensors(run)}
            if run.ema is not None:
                files["ema"] = copied(run.ema.averages)
            files |= {f"rank_{rank}": tensors for rank, tensors in enumerate(ranks)}
            state, intact = describe_state(run, hooks), newest_checkpoint(run)
            with _named(folder, intact):
                temporary = beside(folder)
                if (run.output_dir / MODEL).is_dir():
                    # A better epoch will replace it there.
                    (temporary / "best").mkdir()
                    take_over(run.output_dir / MODEL, temporary / "best")
            limit = run.config.save_total_limit
            run.writer.start(lambda: _write(folder, temporary, files, state, limit, intact))
    run.pending = folder


@contextmanager
def _named(folder: Path, intact: str) -> Iterator[None]:
    """Turn an operating system's error into a sentence about the checkpoint, and leave nothing half-written."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder.with_name(f".{folder.name}.tmp"), ignore_errors=True)
        why = f"no space left on the disk of {folder.parent}" if disk_full(error) else str(error)
        raise RunError(f"the checkpoint {folder} cannot be written ({why}): {intact}; mend it and go on with --resume auto") from None


def _write(
    folder: Path, temporary: Path, files: dict[str, dict[str, Tensor]], state: dict[str, Any], limit: int | None, intact: str
) -> None:
    with _named(folder, intact):
        for name, tensors in files.items():
            write_tensors(temporary / f"{name}.safetensors", tensors)
        write_json(temporary / "state.json", state)
        write_manifest(temporary)
        replace_folder(temporary, folder)
        prune(folder.parent, limit)


def describe_state(run: Run, hooks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """state.json."""
    scaler, train = run.accelerator.scaler, asdict(run.state)
    del train["stop"], train["interrupted"]
    return {
        "version": VERSION,
        "train": train,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "hooks": hooks,
        "config": asdict(run.config),
        "processes": run.processes.count,
        "precision": run.accelerator.mixed_precision,
        "plan": asdict(run.plan) | {"global_batch_size": run.plan.global_batch_size, "updates": run.plan.updates},
        "planned": run.planned,
        "total_steps": run.total_steps,
        "lr": run.optimizer.param_groups[0]["lr"],
        "data": run.data.fingerprint,
    }


def optimizer_tensors(run: Run) -> dict[str, Tensor]:
    """The optimizer's state as tensors on the CPU, named KIND/PARAMETER."""
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    tensors = {}
    for parameter, state in run.optimizer.state.items():
        for kind, value in state.items():
            if value is not None:
                tensors[f"{kind}/{names[parameter]}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def prune(folder: Path, limit: int | None) -> None:
    """Remove the oldest checkpoints beyond `limit`."""
    for path in listed(folder)[: -limit if limit is not None else 0]:
        # What cannot be removed now is tried again next time; the new one is whole.
        shutil.rmtree(path, ignore_errors=True)


def listed(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whole or not, the oldest first."""
    return sorted((path for path in folder.glob("step_*") if NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The update after which a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


# Finding and loading


def find(config: Config, processes: Processes) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` names, loaded by the main process and sent to all; None to start anew. A collective.

    Raises:
        UserError: there is none at the path, it is broken, or it is of another training; or another host has later ones.
    """
    found: list[Checkpoint | None] = []
    with processes.together():
        if processes.is_main:
            found.append(_find(config))
    if config.resume_from_checkpoint == "auto":
        _refuse_stale(config, processes)
    return processes.broadcast(found[0] if found else None)


def _refuse_stale(config: Config, processes: Processes) -> None:
    """Refuse to go on from rank 0's folder when another host's is ahead of it: without a shared one, rank 0 may be elsewhere now."""
    with processes.together():
        paths = listed(Path(config.output_dir or "") / CHECKPOINTS)
    newest = processes.all_gather((step_of(paths[-1]) if paths else -1, socket.gethostname()))
    step, host = max(newest, key=lambda place: place[0])
    if step > newest[0][0]:
        raise UserError(
            f"--resume auto: on host {newest[0][1]}, where rank 0 is, {config.output_dir} has "
            f"{f'step_{newest[0][0]:08d}' if newest[0][0] >= 0 else 'no checkpoint'}, but on host {host} step_{step:08d}: "
            "make --output_dir a folder that all hosts share, or start with the hosts' ranks as they were",
            agreed=True,
        )


def _find(config: Config) -> Checkpoint | None:
    where = config.resume_from_checkpoint
    if where is None:
        return None
    path = Path(config.output_dir or "") if where == "auto" else Path(where)
    named = NAME.fullmatch(path.name) is not None and where != "auto"
    if named and path.parent.is_dir():
        recover_folder(path)
    if where != "auto" and not path.is_dir():
        raise UserError(f"--resume {path}: there is no such folder: name a checkpoint, a run's folder, or auto")
    notes: list[str] = []
    if named:
        broken = problem(path)
        if broken is not None:
            raise UserError(
                f"--resume {path}: the checkpoint is broken, {broken}: choose another, or --resume {run_folder(path) or 'a run'}"
            )
    else:
        newest_whole = _newest(path / CHECKPOINTS, notes)
        if newest_whole is None and notes:
            raise UserError(f"--resume {where}: no checkpoint in {path} is whole ({'; '.join(notes)}): remove the folder to start anew")
        if newest_whole is None and where != "auto":
            raise UserError(f"--resume {path}: there is no checkpoint in it: name a checkpoint, a run's folder, or auto")
        if newest_whole is None:
            return None
        path = newest_whole
    if config.output_dir is None and run_folder(path) is None:
        raise UserError(f"--resume {path} is not in the {CHECKPOINTS} folder of a run, and so says not where to go on: add --output_dir")
    try:
        checkpoint = _load(path, notes)
        was = {name: checkpoint.state["config"][name] for name in FIXED}
    except Exception as error:
        raise UserError(f"--resume {path}: the checkpoint cannot be loaded: {_reason(error)}: choose another checkpoint") from None
    for name, old in was.items():
        new = getattr(config, name)
        if old != new:
            raise UserError(
                f"--{name} {new}: the checkpoint {path} was written with {old}: use that, or train anew in another --output_dir"
            )
    return checkpoint


def _newest(folder: Path, notes: list[str]) -> Path | None:
    for hidden in folder.glob(".step_*.old"):
        recover_folder(folder / hidden.name.removeprefix(".").removesuffix(".old"))
    for path in reversed(listed(folder)):
        broken = problem(path)
        if broken is None:
            return path
        notes.append(f"{path.name} is passed over: {broken}")
    return None


def _load(path: Path, notes: list[str]) -> Checkpoint:
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state["version"] != VERSION:
        raise ValueError(f"its format is version {state['version']}, this trainer reads {VERSION}")
    return Checkpoint(
        path,
        load_file(path / "model.safetensors"),
        load_file(path / "optimizer.safetensors"),
        load_file(path / "ema.safetensors") if (path / "ema.safetensors").exists() else {},
        [load_file(path / f"rank_{rank}.safetensors") for rank in range(state["processes"])],
        state,
        notes,
    )


def _reason(error: Exception) -> str:
    return f"{error} is missing in it" if isinstance(error, KeyError) else " ".join(str(error).split()).rstrip(".")


# Going on


def restore(run: Run, checkpoint: Checkpoint, load_hooks: Callable[[dict[str, Any]], None]) -> None:
    """Put the run where the checkpoint was; `run.resume_notes` then says from where, and what is not as it was. A collective.

    In memory only, so that a checkpoint that does not fit is refused before anything is written; then comes `restore_folder`. The
    generators are restored by the loop, once the first batch is there: making the loader's iterator draws from them.

    Args:
        load_hooks: takes the hooks' states, by class name.

    Raises:
        UserError: the data are not those of the checkpoint, or it does not fit the model, the optimizer or the hooks.
    """
    with run.processes.together():
        try:
            changed = _changed_data(run, checkpoint.state["data"])
            if not changed:
                _restore(run, checkpoint)
                load_hooks(checkpoint.state["hooks"])
        except Exception as error:
            raise UserError(
                f"the checkpoint {checkpoint.path} does not fit this run: {_reason(error)}: choose another checkpoint"
            ) from None
        if changed:
            raise UserError(
                f"{run.config.data_flag} is not what the checkpoint {checkpoint.path} was trained on ({', '.join(changed)}): "
                "use that, or train anew in another --output_dir"
            )


def _changed_data(run: Run, was: dict[str, Any]) -> list[str]:
    data = run.data.fingerprint
    return [f"{name} {was.get(name)} -> {data.get(name)}" for name in data | was if was.get(name) != data.get(name)]


def _restore(run: Run, checkpoint: Checkpoint) -> None:
    state, same_ranks = checkpoint.state, checkpoint.state["processes"] == run.processes.count
    load_tensors(run.module, checkpoint.model)
    _restore_optimizer(run, checkpoint.optimizer, state["lr"])
    if run.ema is not None:
        run.ema.load(checkpoint.ema)
    run.state = TrainState(**state["train"])
    run.first_step = run.state.step
    run.checkpoint = checkpoint.path
    run.resume_notes = [f"from {checkpoint.path}, after update {run.state.step}, epoch {run.state.epoch + 1}", *checkpoint.notes]
    run.resume_notes += _differences(run, state)
    scaler = run.accelerator.scaler
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])
    run.state.loss_scale = scaler.get_scale() if scaler is not None else None
    windows = checkpoint.ranks if not same_ranks else [checkpoint.ranks[run.processes.rank]]
    if same_ranks or run.is_main:
        run.window.loss += sum(float(tensors["window_loss"]) for tensors in windows)
        run.window.samples += sum(int(tensors["window_samples"]) for tensors in windows)
        run.window.bad += sum(int(tensors["window_bad"]) for tensors in windows)
        run.window.grad_norm = windows[0].get("window_grad_norm")
    if run.power_sgd is not None:
        run.power_sgd.load([checkpoint.ranks[run.processes.rank]] if same_ranks else checkpoint.ranks, run.state.step)
    if same_ranks and run.state.consumed:
        run.generators = checkpoint.ranks[run.processes.rank]


def _restore_optimizer(run: Run, tensors: dict[str, Tensor], lr: float) -> None:
    """Put back the state of each parameter, and the newest rate, for the log; all else is the config's."""
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    # torch numbers the weights in the order of the optimizer's groups.
    trained = {names[parameter]: parameter for group in run.optimizer.param_groups for parameter in group["params"]}
    numbers = {name: number for number, name in enumerate(trained)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if name not in trained or (tensor.ndim and tensor.shape != trained[name].shape):
            raise ValueError(f"its optimizer's {key}, of shape {tuple(tensor.shape)}, is of no weight of the model")
        if tensor.ndim:
            # Fused kernels walk through memory: the state must lie there as the weight does.
            tensor = torch.empty_like(trained[name], dtype=tensor.dtype, device="cpu").copy_(tensor)
        state.setdefault(numbers[name], {})[kind] = tensor
    run.optimizer.load_state_dict({"state": state, "param_groups": run.optimizer.state_dict()["param_groups"]})
    for group in run.optimizer.param_groups:
        group["lr"] = lr


def _differences(run: Run, state: dict[str, Any]) -> list[str]:
    """What is not as it was, in sentences; plans the learning rate anew where the number of updates has changed."""
    notes = []
    config, old = asdict(run.config), state["config"]
    names = [field.name for field in fields(Config) if field.name not in INCIDENTAL]
    changed = [f"{name} {old[name]} -> {config[name]}" for name in names if name in old and old[name] != config[name]]
    if changed:
        notes.append(f"changed: {', '.join(changed)}")
    if state["precision"] != run.accelerator.mixed_precision:
        notes.append(f"precision {state['precision']} -> {run.accelerator.mixed_precision}")
    train, plan, was = run.state, run.plan, state["plan"]
    if state["processes"] != run.processes.count:
        left = run.data.plan.samples - train.consumed
        notes.append(
            f"processes {state['processes']} -> {run.processes.count}: the {left} samples that epoch {train.epoch + 1} still has are "
            "dealt out anew, each once; what is random inside the model (dropout) goes on from other seeds"
        )
    same_updates = (was["global_batch_size"], was["updates"]) == (plan.global_batch_size, plan.updates)
    if same_updates:
        run.planned = state["planned"] + (run.config.epochs - old["epochs"]) * plan.updates
    else:
        epochs_left = run.config.epochs - train.epoch - 1
        run.planned = train.step + plan.rest(train.consumed).updates + epochs_left * plan.updates
    run.total_steps = max(train.step, planned_steps(run.config, run.planned))
    run.lr_plan = plan_lr(run.config, plan, run.total_steps)
    if not same_updates:
        notes.append(
            f"global batch {was['global_batch_size']} -> {plan.global_batch_size}: {run.total_steps - train.step} updates are left; "
            "--global_batch_size keeps it for any number of processes"
        )
    if run.total_steps != state["total_steps"] and run.lr_plan.planned_over_all_updates:
        notes.append(
            f"updates {state['total_steps']} -> {run.total_steps}: the learning rate is planned anew over all of them, "
            f"and goes on with {run.lr:.3g}"
        )
    if run.ema is not None and old.get("ema_decay") is None:
        notes.append("the average of --ema_decay begins with the checkpoint's weights")
    if train.epoch >= run.config.epochs or run.total_steps <= train.step:
        notes.append("nothing is left to train: raise --epochs (or --max_steps) to go on")
    return notes


def restore_folder(run: Run, checkpoint: Checkpoint) -> None:
    """Make output_dir what it was at the checkpoint: the best model, and no later checkpoint. A collective."""
    with run.processes.together():
        if run.is_main:
            _restore_folder(run, checkpoint)


def _restore_folder(run: Run, checkpoint: Checkpoint) -> None:
    model, best = run.output_dir / MODEL, checkpoint.path / "best"
    recover_folder(model)
    if best.is_dir():
        temporary = beside(model)
        take_over(best, temporary)
        replace_folder(temporary, model)
    else:
        shutil.rmtree(model, ignore_errors=True)
    before = checkpoint.run_folder
    if before is None or run.output_dir.resolve() != before.resolve():
        for name in ("metrics.jsonl", "train.log"):
            if before is not None and (before / name).is_file():
                shutil.copyfile(before / name, run.output_dir / name)
        return
    folder = run.output_dir / CHECKPOINTS
    for leftover in folder.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for later in [path for path in listed(folder) if step_of(path) > step_of(checkpoint.path)]:
        aside = later.parent / SET_ASIDE / later.name
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(later, aside)
        run.resume_notes.append(f"{later.name}, which is later, is now {aside}")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run's folder holds a finished checkpoint, broken or not."""
    return any((path / MANIFEST).exists() for path in listed(folder / CHECKPOINTS))
