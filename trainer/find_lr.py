"""The learning-rate finder: `accelerate launch trainer/find_lr.py [the same flags as main.py]` measures which rates the training bears."""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.config import Config, parse
from trainer.runtime import Processes, UserError, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep the rate of the training that the flags describe, on the processes that the launcher started.

    Writes lr_finder.json and lr_finder.svg into `--output_dir`, beside whatever is there; a training can then go into that folder.

    Args:
        argv: the flags of main.py; None takes the command line's. Those of the rate, its schedule and the run's length have no effect.

    Raises:
        SystemExit: 2 for a user's mistake, 1 for anything else.
    """
    run_command(lambda: read(sys.argv[1:] if argv is None else argv), measure)


def read(argv: Sequence[str]) -> Config:
    """As `parse`.

    Raises:
        UserError: as `parse`; and for a flag that would have to be passed over.
    """
    config = parse(argv)
    if config.resume_from_checkpoint is not None:
        raise UserError("--resume_from_checkpoint is not for find_lr, which begins with new weights: leave it out")
    if config.local_sgd_steps is not None:
        raise UserError("--local_sgd_steps is not for find_lr, which looks at one loss of all processes: leave it out")
    return config


def measure(config: Config, processes: Processes) -> None:
    """config -> accelerator -> data -> model -> sweep -> output_dir."""
    from trainer.accelerator import build_accelerator
    from trainer.auto_batch import fit_batch
    from trainer.data.loaders import load_data
    from trainer.lr_finder import find_lr
    from trainer.models.build import check_model
    from trainer.output import create_folder, report_end
    from trainer.state import build_run

    with processes.together():
        accelerator = build_accelerator(config, processes)
        check_model(config, resumed=False)
    config, data = fit_batch(config, processes, accelerator, load_data(config, processes))
    run = build_run(config, processes, data, accelerator)
    run.output_dir = create_folder(config, processes)
    report_end(run, exit_file=False)
    run.watch.start(run.output_dir)
    find_lr(run)


if __name__ == "__main__":
    main()
