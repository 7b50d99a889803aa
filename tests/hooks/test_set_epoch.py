"""The order of the images is the epoch's, also after an epoch that was left early."""

from pathlib import Path

from tests.helpers import alone_run, ids_of, needed_hooks, write_ids
from trainer.data.sampler import EpochSampler
from trainer.hooks.base import Hook
from trainer.hooks.set_epoch import SetEpoch
from trainer.loop import fit, train_epoch
from trainer.state import Run


class Order(Hook):
    """Ids of the images that went through the model, by epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def on_fit_start(self, run: Run) -> None:
        run.normalize.register_forward_pre_hook(lambda module, inputs: self.epochs[-1].extend(ids_of(inputs[0])))

    def on_epoch_start(self, run: Run) -> None:
        self.epochs.append([])

    def on_eval_start(self, run: Run) -> None:
        self.epochs.append([])


def expected(samples: int, epoch: int) -> list[int]:
    sampler = EpochSampler(samples, 0)
    sampler.set_epoch(epoch)
    return sampler.order()


def test_every_epoch_has_its_own_order(tmp_path: Path) -> None:
    order = Order()
    with alone_run(write_ids(tmp_path / "ids", train=40), batch_size=8, epochs=3, output_dir=str(tmp_path / "out")) as run:
        fit(run, needed_hooks(order))
    assert order.epochs[::2] == [expected(40, epoch) for epoch in range(3)]
    assert order.epochs[0] != order.epochs[2]


def test_the_epoch_comes_from_the_state_and_not_from_a_count(tmp_path: Path) -> None:
    """As after a resume, or after an epoch that max_steps ended in the middle: Accelerate's own count would repeat the order."""
    order = Order()
    with alone_run(write_ids(tmp_path / "ids", train=40), batch_size=8, epochs=9, max_steps=2, output_dir=str(tmp_path / "out")) as run:
        fit(run, needed_hooks(order))
        assert run.state.step == 2
        assert not run.accelerator.gradient_state.in_dataloader, "the loader that was left early is still active"
        run.state.epoch, run.state.step, run.state.stop = 7, -10, False
        hooks = needed_hooks(order)
        hooks.on_epoch_start(run)
        train_epoch(run, hooks)
    assert order.epochs[0] == expected(40, 0)[:16]
    assert order.epochs[-1] == expected(40, 7)


def test_without_the_hook_the_order_repeats_after_a_break(tmp_path: Path) -> None:
    """What the hook is for: this is the trap, and the test above would fail on it."""
    with alone_run(write_ids(tmp_path / "ids", train=40), batch_size=8) as run:
        SetEpoch().on_epoch_start(run)
        first = []
        for images, *_ in run.train_loader:
            first += ids_of(images)
            run.train_loader.end()
            break
        again = ids_of(next(iter(run.train_loader))[0])
        assert again == first
        run.train_loader.end()
