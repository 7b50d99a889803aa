"""The learning-rate range test (Smith 2017): a short training whose rate rises until the loss diverges, and what it suggests."""

import math
from dataclasses import dataclass
from typing import Any

import numpy

from trainer.files import write_json, write_text
from trainer.hooks.base import HookList
from trainer.hooks.log import describe
from trainer.hooks.seed_processes import SeedProcesses
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import check_gradients, forward_backward, timed
from trainer.models.head import train_mode
from trainer.plot import Chart, Line, chart_figure, drawing, svg
from trainer.state import Run

LOWEST, HIGHEST, UPDATES = 1e-7, 10.0, 100
SMOOTHING = 0.98
# The end: a smoothed loss this many times the lowest one.
DIVERGED = 4.0
# The first smoothed losses are those of a few batches, and say little of a slope.
UNJUDGED = 10
RULE = "the rate at which the smoothed loss falls most steeply, over the logarithm of the rate"
JSON, SVG = "lr_finder.json", "lr_finder.svg"


@dataclass(frozen=True)
class Sweep:
    """What a range test measured, update by update; the same on all ranks.

    Attributes:
        rates: of each update.
        losses: mean training loss over the images of the update, of all ranks, before it is done.
        smoothed: their exponential moving average, corrected for its beginning at 0 (as Kingma and Ba 2015 do).
        ended: why there are no more.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    ended: str

    @property
    def suggestion(self) -> float | None:
        """The rate that RULE names; None where the loss never fell."""
        if len(self.smoothed) < UNJUDGED + 2:
            return None
        # The rates are evenly spaced in the logarithm.
        slopes = numpy.gradient(self.smoothed)[UNJUDGED:]
        steepest = int(slopes.argmin())
        return self.rates[UNJUDGED + steepest] if slopes[steepest] < 0 else None


def sweep(run: Run) -> Sweep:
    """Train with rates from LOWEST to HIGHEST, each the same factor above the one before, for UPDATES updates. A collective.

    Forward and backward passes are the training's own, with its mixtures, label smoothing, accumulation and clipping, from its own order of
    images; the run's state, its optimizer's and the weights are of no use afterwards.
    """
    start_epoch, processes = HookList((SetEpoch(), SeedProcesses())).on_epoch_start, run.processes
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    while len(rates) < UPDATES:
        start_epoch(run)
        train_mode(run.model, run.config.freeze)
        total, images_seen = 0.0, 0
        for micro, batch in enumerate(timed(run.train_loader, run)):
            loss = forward_backward(run, run.plan, micro, batch, micro * run.plan.micro_batch_size)
            size = run.plan.share(micro, processes.rank)
            total, images_seen = total + float(loss) * size, images_seen + size
            if not run.plan.ends_update(micro):
                continue
            run.at("agree")
            # Here a stop that was asked for ends all ranks.
            with processes.together():
                own = (total, images_seen)
            sums = processes.all_gather(own)
            loss_of_all = sum(theirs for theirs, _ in sums) / sum(count for _, count in sums)
            total, images_seen = 0.0, 0
            ended = None if math.isfinite(loss_of_all) else "the loss was not finite any more"
            if ended is None:
                average = SMOOTHING * average + (1 - SMOOTHING) * loss_of_all
                rates.append(LOWEST * (HIGHEST / LOWEST) ** (len(rates) / (UPDATES - 1)))
                losses.append(loss_of_all)
                smoothed.append(average / (1 - SMOOTHING ** len(rates)))
                if smoothed[-1] > DIVERGED * min(smoothed):
                    ended = f"the smoothed loss was above {DIVERGED:g} times its lowest"
                elif len(rates) == UPDATES:
                    ended = "the highest rate was reached"
            if ended is not None:
                run.train_loader.end()
                return Sweep(rates, losses, smoothed, ended)
            update(run, rates[-1])
        run.state.epoch += 1
    raise AssertionError("unreachable")


def update(run: Run, rate: float) -> None:
    """An update as the loop's, of this rate; without its look for what is not finite: here that is an end like another."""
    run.at("update")
    check_gradients(run)
    if run.config.max_grad_norm is not None:
        run.accelerator.clip_grad_norm_(run.model.parameters(), run.config.max_grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    run.optimizer.zero_grad()


def find_lr(run: Run) -> None:
    """Sweep, say what it suggests, and write it into the run's folder. A collective."""
    if run.is_main:
        for key, value in describe(run):
            if key not in ("updates", "lr plan", "ema", "resume"):
                print(f"{key:>10} {value}", flush=True)
    found = sweep(run)
    with run.processes.together():
        if run.is_main:
            write(run, found)
            print(f"find_lr {said(run, found)}; {JSON} and {SVG} in {run.output_dir}", flush=True)


def flag_of(run: Run, rate: float) -> float:
    """The `--lr` of a rate, which `--scale_lr` multiplies it to."""
    return rate * run.config.lr / run.lr_plan.peak


def said(run: Run, found: Sweep) -> str:
    ended = f"after {len(found.rates)} updates {found.ended}"
    if found.suggestion is None:
        return f"{ended}; no rate is suggested, since the loss never fell"
    return f"{ended}; suggested: --lr {flag_of(run, found.suggestion):.2g} ({RULE})"


def write(run: Run, found: Sweep) -> None:
    """lr_finder.json and lr_finder.svg."""
    suggestion = found.suggestion
    content: dict[str, Any] = {
        "suggestion": suggestion,
        "suggested_lr": flag_of(run, suggestion) if suggestion is not None else None,
        "rule": RULE,
        "ended": found.ended,
        "global_batch_size": run.plan.global_batch_size,
        "smoothing": SMOOTHING,
        "rates": found.rates,
        "losses": found.losses,
        "smoothed": found.smoothed,
    }
    write_json(run.output_dir / JSON, content)
    if len(found.rates) > 1:
        write_text(run.output_dir / SVG, picture(found))


def picture(found: Sweep) -> str:
    """The losses over the rates, as SVG; cut off not far above where they fell from, since they end far out."""
    low, lowest = min(found.losses), found.smoothed.index(min(found.smoothed))
    high = max(found.smoothed[: lowest + 1])
    margin = 0.25 * (high - low) or 0.1
    lines = (
        Line("each update", found.rates, found.losses, "teal", width=0.9),
        Line("smoothed", found.rates, found.smoothed, "blue", width=2.2),
    )
    suggestion = found.suggestion
    mark = (suggestion, f"steepest fall: {suggestion:.2g}") if suggestion is not None else None
    title = "Training loss while the rate rises"
    chart = Chart(title, "learning rate", lines, (low - margin, high + margin), x_log=True, mark=mark)
    with drawing():
        return svg(chart_figure([chart]), title)
