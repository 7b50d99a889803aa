"""What can be forgotten in a distributed training, one file a check, in the order of the table; `trainer/doctor.py` runs them."""

from trainer.checks import (
    augmentation,
    collectives,
    ddp,
    disk,
    evaluation,
    gradients,
    order,
    precision,
    process_group,
    readable,
    resume,
    shards,
    sync_bn,
    weights,
    writing,
)
from trainer.checks.base import Check

BEFORE_BUILDING = (
    Check("process group", process_group.check),
    Check("readable data", readable.check, needs=("images",)),
)
CHECKS = (
    *BEFORE_BUILDING,
    Check("DDP wrapping", ddp.check, needs=("model",)),
    Check("SyncBN", sync_bn.check, needs=("model",)),
    Check("precision", precision.check, needs=("model", "train_loader")),
    Check("equal weights", weights.check, needs=("model",)),
    Check("gradients", gradients.check, needs=("model", "train_loader")),
    Check("shards", shards.check, needs=("train_loader",)),
    Check("order", order.check, needs=("train_loader",)),
    Check("augmentation", augmentation.check, needs=("train_loader",)),
    Check("evaluation", evaluation.check, needs=("model", "eval_loader", "evaluate")),
    Check("one writer", writing.check, needs=("save",)),
    Check("resume", resume.check, needs=("resumed",)),
    Check("collectives", collectives.check),
    Check("free disk", disk.check, needs=("model",)),
)
