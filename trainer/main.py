"""The command: `accelerate launch trainer/main.py [--config RECIPE] [flags]`, or `python -m trainer.main`."""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.config import Config, parse
from trainer.runtime import Processes, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say, on the processes that the launcher started; returns when done.

    Args:
        argv: flags; None takes the command line's.

    Raises:
        SystemExit: the run failed; 2 for a user's mistake, 1 for anything else.
    """
    run_command(lambda: parse(sys.argv[1:] if argv is None else argv), train)


def train(config: Config, processes: Processes) -> None:
    """config -> accelerator -> data -> model -> loop and hooks -> output_dir."""
    # Heavy imports come after the flags are checked: a mistyped one is answered at once.
    from trainer.accelerator import build_accelerator
    from trainer.data.loaders import load_data
    from trainer.hooks.base import HookList
    from trainer.hooks.gather_metrics import GatherMetrics
    from trainer.hooks.log import Log
    from trainer.hooks.progress import Progress
    from trainer.hooks.save_on_main import SaveOnMain
    from trainer.hooks.seed_processes import SeedProcesses
    from trainer.hooks.set_epoch import SetEpoch
    from trainer.loop import fit
    from trainer.output import create_output_dir, write_exit
    from trainer.state import build_run

    with processes.together():
        accelerator = build_accelerator(config, processes)
    data = load_data(config, processes)
    run = build_run(config, processes, data, accelerator)
    run.output_dir = create_output_dir(config, processes, data.classes)
    if run.is_main:
        processes.at_exit.append(lambda code, reason: write_exit(run.output_dir, code, reason, run.state.step))
    hooks = (SetEpoch(), SeedProcesses(), GatherMetrics(), SaveOnMain(), Log(), Progress())
    fit(run, HookList(hooks))


if __name__ == "__main__":
    main()
