"""The best epoch's model, written by one process."""

from typing import Any

from trainer.agreement import check_tensors
from trainer.export import save_model
from trainer.hooks.base import Hook
from trainer.state import Run


class SaveOnMain(Hook):
    """Writes output_dir/model when the epoch was the best so far: by the main process only, into place in one step.

    With `--ema_decay` the averaged weights, which were evaluated.
    """

    def on_epoch_end(self, run: Run) -> None:
        if run.state.best["epoch"] != run.state.epoch:
            return
        # All ranks know the best epoch; a full disk ends them together.
        with run.processes.together():
            if run.is_main:
                check_tensors(run)
                with run.averaged():
                    self.save(run)

    def save(self, run: Run) -> None:
        state = run.state
        channels, height, width = run.data.train.shape
        scaler = run.accelerator.scaler
        save_model(
            run.output_dir / "model",
            run.module,
            {
                "architecture": run.config.model,
                "in_channels": channels,
                "size": [height, width],
                "num_classes": len(run.data.classes),
                "classes": list(run.data.classes),
                "mean": list(run.data.mean),
                "std": list(run.data.std),
                "precision": run.accelerator.mixed_precision,
                "dataset": run.config.data_name,
                "data": data_of(run),
                "epoch": state.epoch,
                "step": state.step,
                "acc1": state.best["acc1"],
                "loss": state.best["loss"],
                "ema_decay": run.config.ema_decay,
            },
            scaler.state_dict() if scaler is not None else None,
        )


def data_of(run: Run) -> dict[str, Any]:
    """The flags that name what was evaluated, for trainer/evaluate.py to find it again."""
    config, held_out = run.config, run.data.held_out is not None
    flags = {
        "dataset": config.dataset if config.data_dir is None else None,
        "data_dir": config.data_dir,
        "dataset_config": config.dataset_config,
        "train_split": config.train_split if held_out else None,
        "eval_split": None if held_out else run.data.test_split,
        "val_fraction": config.val_fraction,
        "seed": config.seed if held_out else None,
        "image_column": config.image_column,
        "label_column": config.label_column,
    }
    return {name: value for name, value in flags.items() if value is not None}
