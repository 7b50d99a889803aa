"""Evaluation over all ranks that counts each image of the test split exactly once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.hooks.base import Hook
from trainer.metrics import Totals
from trainer.state import Run


class GatherMetrics(Hook):
    """Gathers per-image labels, predictions and losses of each batch, and sums them up on every rank alike.

    Averages of ranks would be wrong: the last batch is filled up so that all ranks take part, and `gather_for_metrics` can cut the
    repeated images off only while there is one value for each image. An image that could not be read has the label `LEFT_OUT`.
    """

    totals: Totals

    def on_eval_start(self, run: Run) -> None:
        self.totals = Totals.zeros(len(run.data.classes), run.accelerator.device)

    def on_eval_batch(self, run: Run, logits: Tensor, labels: Tensor, keys: Tensor) -> None:
        likelihood = F.log_softmax(logits.float(), 1)
        losses = F.nll_loss(likelihood, labels, reduction="none")
        top = logits.topk(min(5, logits.shape[1])).indices
        in_top5 = (top == labels[:, None]).any(1)
        # One table, so that a batch takes one collective; of float64, since one column is, which holds whole numbers up to 2^53.
        table = torch.stack((labels, top[:, 0], in_top5, losses.double(), likelihood.amax(1), keys), dim=1)
        self.totals.add(run.accelerator.gather_for_metrics(table))

    def on_eval_end(self, run: Run) -> None:
        metrics = self.totals.metrics()
        counted = metrics["samples"] + metrics["bad_images"]
        assert counted == len(run.data.test), (counted, len(run.data.test))
        run.state.metrics = metrics
