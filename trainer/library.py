"""Training from Python: in a script, a notebook, or in each process of a launcher, and going on afterwards."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.main import train as run_training
from trainer.runtime import Processes, run_call

if TYPE_CHECKING:
    from trainer.hooks.base import Hook


def train(config: Config, hooks: "Sequence[Hook]" = ()) -> dict[str, Any]:
    """Train on the processes that a launcher or `accelerate.notebook_launcher` started, or on this one, and go on in this Python.

    Where one of several processes fails alone, those that wait for it end, as they do in a command: a collective cannot be left.

    Args:
        config: all settings; `trainer.config.parse(["--config", "mnist"])` gives a recipe's.
        hooks: of one's own, called after the trainer's, on every process.

    Returns:
        What results.json holds, and the folder as `output_dir`; on every process.

    Raises:
        UserError: a mistake in the settings, files or data, in a sentence.
        RunError: what went wrong in the middle: a full disk, a loss that is not finite.
        Stopped: stopped by Ctrl-C, a signal or `max_time`, with a checkpoint.
    """

    def body(processes: Processes) -> dict[str, Any]:
        folder = run_training(config, processes, tuple(hooks))
        results: list[Any] = [None]
        with processes.together():
            if processes.is_main:
                results = [json.loads((folder / "results.json").read_text(encoding="utf-8"))]
        return {**processes.broadcast(results[0]), "output_dir": str(folder)}

    return run_call(body)
