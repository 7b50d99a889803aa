"""The model is wrapped, so that gradients are averaged, and the optimizer updates the very parameters that are."""

from trainer.checks.base import Result, Subject, find_ddp, quantity


def check(subject: Subject) -> Result:
    assert subject.model is not None
    model = subject.model
    if subject.count == 1:
        return Result("SKIPPED", "one process: nothing to average")
    sizes = subject.each(lambda: ddp.process_group.size() if (ddp := find_ddp(model)) is not None else 0)
    if 0 in sizes:
        return Result(
            "FAIL",
            f"the model is a {type(model).__name__}, not wrapped: every rank would train a model of its own; use "
            "accelerator.prepare(model) or DistributedDataParallel(model)",
        )
    if any(size != subject.count for size in sizes):
        return Result("FAIL", f"DDP averages over {min(sizes)} of the {subject.count} processes: leave its process_group out")
    wrapped = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if subject.optimizer is not None:
        updated = {id(parameter) for group in subject.optimizer.param_groups for parameter in group["params"]}
        strange, missed = (max(subject.each(work)) for work in (lambda: len(updated - wrapped), lambda: len(wrapped - updated)))
        if strange:
            return Result(
                "FAIL",
                f"the optimizer holds {quantity(strange, 'tensor')} that the model does not train: build it after the last change "
                "to the model (SyncBN's conversion, .to(device))",
            )
        if missed:
            return Result("FAIL", f"the optimizer leaves out {quantity(missed, 'tensor')} that the model trains")
    return Result("PASS", f"DistributedDataParallel over {subject.count} processes, {quantity(len(wrapped), 'tensor')}")
