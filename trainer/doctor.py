"""The doctor: `accelerate launch trainer/doctor.py [the same flags as main.py]` checks what a distributed training can silently get wrong.

On a script of one's own: `from trainer.doctor import inspect`.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.config import Config, parse
from trainer.runtime import Processes, UserError, run_command

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.checks.report import Report


def main(argv: Sequence[str] | None = None) -> None:
    """Check the training that the flags describe, on the processes that the launcher started, and print the table.

    Args:
        argv: the flags of main.py; None takes the command line's.

    Raises:
        SystemExit: 1 when a check failed, 2 for a user's mistake.
    """
    run_command(lambda: parse(sys.argv[1:] if argv is None else argv), examine)


def examine(config: Config, processes: Processes) -> None:
    """Inspect a run built as main.py builds it, and leave the group; temporary files aside, only `--output_dir`'s doctor.json is written.

    Raises:
        SystemExit: a check failed.
        UserError: doctor.json cannot be written.
    """
    from trainer.checks import leaving
    from trainer.checks.report import Report, add, watched

    report = Report()
    rank = processes.rank
    model = inspect_run(config, processes, report)
    with watched(leaving.NAME, leaving.PATIENCE, rank):
        result = leaving.leave(processes, model)
    add(report, leaving.NAME, result, rank)
    if rank == 0:
        print(report.summary(), flush=True)
        if config.output_dir is not None:
            write(report, Path(config.output_dir))
    elif result.status == "FAIL":
        print(f"doctor: rank {rank}: {result.measured}", file=sys.stderr, flush=True)
    if report.failed:
        raise SystemExit(1)


def write(report: "Report", folder: Path) -> None:
    """doctor.json, which the report of a run in that folder shows.

    Raises:
        UserError: it cannot be written.
    """
    import time

    from trainer.files import write_json
    from trainer.record import DOCTOR

    content = {
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "summary": report.summary(),
        "checks": [{"name": name, "status": result.status, "measured": result.measured} for name, result in report.results.items()],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / DOCTOR, content)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be made or written ({error.strerror}): choose another --output_dir") from None


def inspect_run(config: Config, processes: Processes, report: "Report") -> Any:
    """Build the run and check it; returns a weak reference to its prepared model, None when the images cannot be read."""
    import weakref
    from dataclasses import replace

    from trainer.accelerator import build_accelerator
    from trainer.auto_batch import fit_batch
    from trainer.checks import BEFORE_BUILDING, CHECKS
    from trainer.checks.base import Subject, messengers
    from trainer.checks.own import images_of, shorten_test, subject_of
    from trainer.checks.report import run_checks
    from trainer.checks.script import forward
    from trainer.data.loaders import find_source, load_data
    from trainer.models.build import check_model
    from trainer.state import build_run

    with processes.together():
        accelerator = build_accelerator(config, processes)
        check_model(config, resumed=False)
    source = find_source(config, processes)
    images, folder = images_of(source, config), Path(config.output_dir or "runs")
    with messengers() as own:
        subject = Subject(
            processes=own,
            device=accelerator.device,
            accelerator=accelerator,
            forward=forward,
            images=images,
            skips_bad=config.on_bad_image == "skip",
            folder=folder,
            absent="not built, since there are images that cannot be used",
        )
        run_checks(subject, BEFORE_BUILDING, report)
        checks = CHECKS[len(BEFORE_BUILDING) :]
        if "readable data" in report.failed:
            run_checks(subject, checks, report)
            return None
        # Decoding and measuring all images would take the most time, and no check depends on it.
        config = replace(config, cache="none", normalize="none")
        config, data = fit_batch(config, processes, accelerator, load_data(config, processes))
        data, config = shorten_test(data, config, processes)
        run = build_run(config, processes, data, accelerator)
        run_checks(subject_of(run, own, images, folder), checks, report)
    run.close()
    return weakref.ref(run.model)


def inspect(
    *,
    model: "nn.Module | None" = None,
    optimizer: Any = None,
    train_loader: Any = None,
    eval_loader: Any = None,
    accelerator: Any = None,
    scaler: Any = None,
    precision: str | None = None,
    forward: "Callable[[nn.Module, Any], tuple[Tensor, Tensor]] | None" = None,
    loss: "Callable[[Tensor, Tensor], Tensor] | None" = None,
    start_epoch: Callable[[int], Any] | None = None,
    train_step: Callable[[Any], Any] | None = None,
    evaluate: Callable[[], Sequence[float] | None] | None = None,
    save: Callable[[Path], Any] | None = None,
    load: Callable[[Path], Any] | None = None,
    folder: str | Path = ".",
    patience: float = 60.0,
) -> "Report":
    """Check a hand-written script, on Accelerate or on DistributedDataParallel alone; every rank calls it, with its own handles.

    What is left out is skipped. Weights, optimizer, scaler, random generators and loaders are put back, so that the script can train on.

    Args:
        model: as the script calls it: prepared or wrapped, on its device.
        train_loader, eval_loader: as the script iterates over them.
        accelerator: of a script that uses one; tells scaler and precision.
        scaler: the GradScaler of a script without accelerator.
        precision: 'no', 'fp16' or 'bf16', as the script was asked for.
        forward: (model, batch) -> (logits, labels), with the script's autocast; unset: batches are (images, labels).
        loss: (logits, labels) -> mean loss; unset: cross-entropy.
        start_epoch: what the script calls before epoch n, for example `train_loader.sampler.set_epoch`; None says that it calls nothing.
        train_step: one update on one batch.
        evaluate: the script's evaluation; returns (images classified right, images counted) or also the mean loss.
        save: writes a checkpoint into the folder it is given.
        load: loads the checkpoint of a folder into model, optimizer and scaler; the check of a resume needs train_step and save too.
        folder: where checkpoints will go; temporary folders are made inside, and removed.
        patience: seconds after which a check that does not end is taken for a hang: it ends the processes with code 1.
    """
    from torch.nn.functional import cross_entropy

    from trainer.checks import CHECKS, script
    from trainer.checks.base import Subject, messengers
    from trainer.checks.report import Report, run_checks

    report = Report()
    with messengers() as processes:
        subject = Subject(
            processes=processes,
            device=script.device_of(model, accelerator),
            model=model,
            optimizer=optimizer,
            train_loader=train_loader,
            eval_loader=eval_loader,
            accelerator=accelerator,
            scaler=scaler if accelerator is None else accelerator.scaler,
            precision=precision if accelerator is None else accelerator.mixed_precision,
            forward=forward or script.forward,
            loss=loss or cross_entropy,
            start_epoch=start_epoch,
            train_step=train_step,
            evaluate=evaluate,
            save=save,
            resumed=script.resuming(model, optimizer, train_loader, train_step, save, load)
            if model is not None and optimizer is not None and train_loader is not None and train_step and save and load
            else None,
            images=script.images_of(train=train_loader, test=eval_loader),
            folder=Path(folder),
        )
        run_checks(subject, CHECKS, report, patience)
        if processes.is_main:
            print(report.summary(), flush=True)
    return report


if __name__ == "__main__":
    main()
