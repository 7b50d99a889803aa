"""Where all ranks decide together whether to go on."""

import math
from typing import NoReturn

from trainer.files import write_json
from trainer.finite import Finding, first_bad_tensor
from trainer.runtime import RunError
from trainer.state import Run
from trainer.stops import EARLY_STOPPING, NOT_FINITE, NOT_WRITTEN


def interrupted(run: Run) -> bool:
    """Whether all ranks stop here, for what one of them had asked at the call before; called at every update and evaluation batch.

    A collective that does not wait. With several ranks not each call is one: see `Pace`.

    Raises:
        RunError: a loss or gradient is not finite.
    """
    run.at("agree")
    stops = run.processes.stops
    if run.config.local_sgd_steps is not None:
        # The next call can be many updates away.
        _take(run, stops.agreed_now())
    elif run.pace.due(run.processes):
        _take(run, stops.agreed())
    return run.state.interrupted is not None


def settle(run: Run) -> None:
    """Decide now, on everything that any rank knows; before a checkpoint and at an epoch's end. A collective that waits.

    Raises:
        RunError: a loss or gradient is not finite.
    """
    run.at("agree")
    run.finite.flush()
    note_finding(run)
    _take(run, run.processes.stops.agreed_now())


def note_finding(run: Run) -> None:
    """Ask all ranks to stop when this one has found something that is not finite."""
    if run.finite.finding is not None:
        run.processes.stops.request(NOT_FINITE)


def _take(run: Run, reason: str | None) -> None:
    if reason == NOT_FINITE:
        raise_not_finite(run)
    if reason == NOT_WRITTEN:
        await_checkpoint(run)
    if reason == EARLY_STOPPING:
        run.state.stop = True
    elif reason is not None:
        run.state.interrupted = reason


def raise_not_finite(run: Run) -> NoReturn:
    """End the run, with the samples of the earliest finding in output_dir/not_finite.json. A collective.

    Raises:
        RunError: always, the same on all ranks.
    """
    await_checkpoint(run)
    findings: list[Finding | None] = run.processes.all_gather(run.finite.finding)
    # A loss on one rank makes the gradient of all ranks what it is: the loss is what to tell.
    first = min(filter(None, findings), key=lambda found: (found.update.epoch, found.update.start, math.isfinite(found.loss)))
    update, file = first.update, run.output_dir / "not_finite.json"
    with run.processes.together():
        if run.is_main:
            # The order is a function of the epoch: nothing had to be recorded.
            run.sampler.set_epoch(update.epoch)
            write_json(
                file,
                {
                    "reason": first.reason,
                    "epoch": update.epoch + 1,
                    "step": update.step + 1,
                    "samples": run.sampler.order()[update.start : update.start + update.size],
                    "ranks": {
                        rank: {"loss": str(finding.loss), "grad_norm": str(finding.grad_norm)}
                        for rank, finding in enumerate(findings)
                        if finding is not None and finding.update == update
                    },
                },
            )
    raise RunError(
        f"{first.reason} in update {update.step + 1} of epoch {update.epoch + 1}: its {update.size} samples are named in {file}; "
        f"{newest_checkpoint(run)}; lower --lr or set --max_grad_norm",
        agreed=True,
    )


def await_checkpoint(run: Run) -> None:
    """Return when the checkpoint that is being written, if any, is whole. A collective.

    Raises:
        RunError: it could not be written; earlier ones stay as they were.
    """
    run.at("checkpoint")
    with run.processes.together():
        if run.is_main:
            run.writer.wait()
    run.checkpoint, run.pending = run.pending or run.checkpoint, None


def check_tensors(run: Run) -> None:
    """Look at every weight and buffer before it is written; BatchNorm's statistics keep an overflow that the GradScaler has skipped.

    Raises:
        RunError: one is not finite.
    """
    averages = {f"the average of {name}": tensor for name, tensor in run.ema.averages.items()} if run.ema is not None else {}
    bad = first_bad_tensor(run.module.state_dict() | averages)
    if bad is not None:
        raise RunError(
            f"{bad} holds values that are not finite at update {run.state.step}: no checkpoint is written, "
            f"{newest_checkpoint(run)}; lower --lr or set --max_grad_norm"
        )


def newest_checkpoint(run: Run) -> str:
    """What an error message says of the newest whole checkpoint."""
    return f"the newest checkpoint, {run.checkpoint}, is intact" if run.checkpoint else "there is no earlier checkpoint"
