"""The report: `python trainer/report.py RUN …` makes report.html and plots/*.png of a run's folder, as they are made after a training."""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # A script's own folder heads sys.path, where trainer/data would be found as `data`; the clone's root belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from trainer.commands import Arguments, run_alone


def main(argv: Sequence[str] | None = None) -> None:
    """Make the reports of the runs that the arguments name: also of one that still trains, or was stopped.

    Args:
        argv: the runs' folders; None takes the command line's.

    Raises:
        SystemExit: 2 for a user's mistake, 1 for a report that cannot be written.
    """
    run_alone("report", lambda: make(argv))


def make(argv: Sequence[str] | None) -> int:
    from trainer.html_report import write_report

    parser = Arguments("python trainer/report.py RUN [RUN ...]", "Make report.html and plots/*.png of a run's folder.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a training (its --output_dir)")
    for run in parser.read(argv).runs:
        print(f"report {write_report(run)}", flush=True)
    return 0


if __name__ == "__main__":
    main()
