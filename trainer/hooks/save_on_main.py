"""The best epoch's model, written by one process."""

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
                "epoch": state.epoch,
                "step": state.step,
                "acc1": state.best["acc1"],
                "loss": state.best["loss"],
                "ema_decay": run.config.ema_decay,
            },
            scaler.state_dict() if scaler is not None else None,
        )
