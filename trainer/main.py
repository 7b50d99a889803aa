"""The command: `accelerate launch trainer/main.py [--config RECIPE] [flags]`, or `python -m trainer.main`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.config import Config, parse, require_same
from trainer.runtime import Processes, Stopped, run_command

if TYPE_CHECKING:
    from trainer.hooks.base import Hook


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say, on the processes that the launcher started; returns when done.

    Args:
        argv: flags; None takes the command line's.

    Raises:
        SystemExit: the run failed; 2 for a user's mistake, 1 for anything else.
    """
    run_command(lambda: parse(sys.argv[1:] if argv is None else argv), train)


def train(config: Config, processes: Processes, own_hooks: "tuple[Hook, ...]" = ()) -> Path:
    """config -> accelerator -> data -> model -> loop and hooks -> output_dir, which is returned."""
    # Heavy imports come after the flags are checked: a mistyped one is answered at once.
    from trainer.accelerator import build_accelerator
    from trainer.auto_batch import fit_batch
    from trainer.checkpoint import find, restore, restore_folder
    from trainer.data.loaders import load_data
    from trainer.hooks.audit import Audit
    from trainer.hooks.base import HookList
    from trainer.hooks.checkpoints import Checkpoints
    from trainer.hooks.early_stopping import EarlyStopping
    from trainer.hooks.gather_metrics import GatherMetrics
    from trainer.hooks.log import Log
    from trainer.hooks.max_time import MaxTime
    from trainer.hooks.own import build_hooks, refuse_same_names
    from trainer.hooks.profiler import Profiler
    from trainer.hooks.progress import Progress
    from trainer.hooks.report import Report
    from trainer.hooks.save_on_main import SaveOnMain
    from trainer.hooks.seed_processes import SeedProcesses
    from trainer.hooks.set_epoch import SetEpoch
    from trainer.hooks.track import Track
    from trainer.loop import fit
    from trainer.models.build import check_model
    from trainer.output import create_output_dir, report_end
    from trainer.state import build_run

    require_same(config, processes)
    with processes.together():
        accelerator = build_accelerator(config, processes)
    if config.push_to_hub is not None:
        # An upload alone needs it.
        from trainer.hub import check_upload, push

        check_upload(config.push_to_hub, processes)
    checkpoint = find(config, processes)
    with processes.together():
        check_model(config, resumed=checkpoint is not None)
        own_hooks = (*build_hooks(config), *own_hooks)
        refuse_same_names(own_hooks)
    config, data = fit_batch(config, processes, accelerator, load_data(config, processes))
    run = build_run(config, processes, data, accelerator, resumed=checkpoint is not None)
    track = Track()
    hooks: tuple[Hook, ...] = (
        SetEpoch(),
        SeedProcesses(),
        GatherMetrics(),
        SaveOnMain(),
        Profiler(),
        track,
        Log(),
        Progress(),
        Audit(),
        MaxTime(),
        EarlyStopping(),
        *own_hooks,
    )
    if checkpoint is not None:
        restore(run, checkpoint, HookList(hooks).load_state_dict)
    run.output_dir = create_output_dir(
        config, processes, data.classes, checkpoint, lambda folder: track.start(run, folder, resumed=checkpoint is not None)
    )
    report_end(run)
    if checkpoint is not None:
        restore_folder(run, checkpoint)
    elif config.resume_from_checkpoint is not None:
        run.resume_notes = [f"there is no checkpoint in {run.output_dir}: the training starts anew"]
    run.watch.start(run.output_dir)
    fit(run, HookList((*hooks, Checkpoints(hooks), Report())))
    if run.state.interrupted is not None:
        raise Stopped(
            f"{run.state.interrupted} at update {run.state.step}, epoch {run.state.epoch + 1}; go on with --resume {run.output_dir}"
        )
    if config.push_to_hub is not None:
        push(run)
    return run.output_dir


if __name__ == "__main__":
    main()
