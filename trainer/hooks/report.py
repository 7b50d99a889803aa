"""The report of a training that has come to its end."""

import shutil

from PIL import Image

from trainer.data.decode import ImageError
from trainer.hooks.base import Hook
from trainer.html_report import write_report
from trainer.record import MISTAKES, PLOTS
from trainer.runtime import say
from trainer.state import Run

# Longest side of a mistake's picture, pixels.
SIDE = 160


class Report(Hook):
    """Writes report.html, plots/*.png and the pictures of the mistakes, from the main process only, when all else has been written.

    A report that cannot be made takes nothing from the training, whose exit code stays 0: stderr says why, and how to make it later.
    """

    def on_fit_end(self, run: Run) -> None:
        run.at("report")
        # The training has ended on all ranks: that the others wait for this one now is no hang, however long it draws.
        run.watch.close()
        if not run.is_main or not run.config.report:
            return
        try:
            save_mistakes(run)
            write_report(run.output_dir)
        except Exception as error:
            say(
                f"the report cannot be made ({' '.join(str(error).split()) or type(error).__name__}), all else of the run is whole: mend "
                f"that, then `python trainer/report.py {run.output_dir}`"
            )


def save_mistakes(run: Run) -> None:
    """plots/mistakes/INDEX.png, as the evaluation saw them; at most SIDE pixels high and wide. One that cannot be read is left out."""
    folder = run.output_dir / PLOTS / MISTAKES
    shutil.rmtree(folder, ignore_errors=True)
    for index, *_ in run.state.metrics.get("mistakes", []):
        try:
            pixels = run.data.test.gather([index])[0].cpu()
        except (ImageError, OSError):
            continue
        picture = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy())
        picture.thumbnail((SIDE, SIDE))
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{index}.png")
