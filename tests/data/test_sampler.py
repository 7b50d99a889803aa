"""Which image is trained when and by which rank: against brute force, and through Accelerate's own sharding."""

from fractions import Fraction
from itertools import product, zip_longest

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from trainer.data.sampler import EPOCH_SHIFT, BatchPlan, EpochSampler, RankBatchSampler, pack_key, unpack_key

SAMPLES = (1, 2, 3, 5, 16, 17, 31, 32, 33, 34, 35, 63, 64, 65, 100)
PROCESSES = (1, 2, 3, 4, 7)
PLANS = [
    BatchPlan(samples, processes, batch_size, accumulation)
    for samples, processes, batch_size, accumulation in product(SAMPLES, PROCESSES, (1, 2, 5, 16), (1, 2, 3))
    if samples >= processes
]


def brute_force(plan: BatchPlan) -> list[list[int]]:
    """By micro-batch: each rank's number of images, dealt out one by one."""
    left, micro_batches = plan.samples, []
    while left:
        size = min(left, plan.batch_size * plan.processes)
        left -= size
        if size < plan.processes:
            break
        shares = [0] * plan.processes
        for image in range(size):
            shares[image % plan.processes] += 1
        micro_batches.append(shares)
    return micro_batches


def test_the_arithmetic_equals_dealing_out_one_by_one() -> None:
    for plan in PLANS:
        expected = brute_force(plan)
        micros, ranks = range(plan.micro_batches), range(plan.processes)
        assert [[plan.share(micro, rank) for rank in ranks] for micro in micros] == expected, plan
        assert [plan.size(micro) for micro in micros] == [sum(shares) for shares in expected], plan
        assert sum(plan.size(micro) for micro in micros) == plan.samples - plan.dropped, plan
        assert all(1 <= share <= plan.batch_size for shares in expected for share in shares), plan
        assert 0 <= plan.dropped < plan.processes, plan


def test_updates_are_groups_of_micro_batches() -> None:
    for plan in PLANS:
        updates: list[list[int]] = [[]]
        for micro in range(plan.micro_batches):
            updates[-1].append(micro)
            if plan.ends_update(micro) and micro + 1 < plan.micro_batches:
                updates.append([])
        assert len(updates) == plan.updates, plan
        assert all(len(group) == plan.accumulation for group in updates[:-1]), plan
        assert plan.ends_update(plan.micro_batches - 1), plan
        for group in updates:
            assert {plan.update_size(micro) for micro in group} == {sum(plan.size(micro) for micro in group)}, plan
        assert plan.global_batch_size == plan.batch_size * plan.processes * plan.accumulation


def test_the_weights_make_the_mean_over_ranks_the_mean_over_images() -> None:
    """Exactly: the coefficient of each image's loss in DDP's mean of the ranks' weighted mean losses is 1 / (images of the update)."""
    for plan in PLANS:
        for micro, rank in product(range(plan.micro_batches), range(plan.processes)):
            share = plan.share(micro, rank)
            weight = Fraction(plan.loss_weight(micro, rank)).limit_denominator(10**6)
            assert weight / plan.processes / share == Fraction(1, plan.update_size(micro)), (plan, micro, rank)
            if plan.update_size(micro) == plan.micro_batch_size and plan.accumulation == 1:
                assert plan.loss_weight(micro, rank) == 1.0


def test_weighted_losses_of_random_images() -> None:
    plan = BatchPlan(samples=47, processes=3, batch_size=4, accumulation=2)
    losses = torch.rand(plan.samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    start, update, total = 0, [], 0.0
    for micro in range(plan.micro_batches):
        for rank in range(plan.processes):
            part = losses[start : start + plan.share(micro, rank)]
            start += len(part)
            update += part
            total += plan.loss_weight(micro, rank) / plan.processes * sum(part) / len(part)
        if plan.ends_update(micro):
            assert total == pytest.approx(sum(update) / len(update), rel=1e-14)
            update, total = [], 0.0
    assert start == plan.samples - plan.dropped == 47


@pytest.mark.parametrize(("samples", "tail"), [(34, [1, 1]), (35, [2, 1]), (63, [16, 15]), (33, None), (64, [16, 16])])
def test_tails_on_two_ranks_of_sixteen(samples: int, tail: list[int] | None) -> None:
    plan = BatchPlan(samples, 2, 16, 1)
    assert plan.micro_batches == (2 if tail else 1)
    assert plan.dropped == (0 if tail else 1)
    assert [plan.share(plan.micro_batches - 1, rank) for rank in range(2)] == (tail or [16, 16])


def test_keys_carry_the_epoch() -> None:
    for epoch, index in product((0, 1, 7, 10**6), (0, 1, 59_999, (1 << EPOCH_SHIFT) - 1)):
        assert unpack_key(pack_key(epoch, index)) == (epoch, index)
    assert pack_key(0, 5) == 5
    assert pack_key(10**6, 0) < 2**63, "a key fits into an int64 tensor"


def order(samples: int, seed: int, epoch: int) -> list[int]:
    sampler = EpochSampler(samples, seed)
    sampler.set_epoch(epoch)
    return sampler.order()


def test_the_order_is_a_permutation_that_seed_and_epoch_rule() -> None:
    orders = [order(200, seed, epoch) for seed in (0, 1) for epoch in range(5)]
    assert all(sorted(one) == list(range(200)) for one in orders)
    assert len({tuple(one) for one in orders}) == 10
    assert orders == [order(200, seed, epoch) for seed in (0, 1) for epoch in range(5)]


def test_the_sampler_gives_keys_of_its_epoch_and_ignores_the_global_generator() -> None:
    sampler = EpochSampler(20, 3)
    assert len(sampler) == 20
    for epoch in (0, 4, 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch + 100)
        assert [unpack_key(key) for key in sampler] == [(epoch, index) for index in order(20, 3, epoch)]


def shards(plan: BatchPlan, epoch: int = 0) -> list[list[list[int]]]:
    """By rank: the batches that Accelerate's real shard of our batch sampler gives it."""
    parts = []
    for rank in range(plan.processes):
        sampler = EpochSampler(plan.samples, 0)
        sampler.set_epoch(epoch)
        shard = BatchSamplerShard(RankBatchSampler(sampler, plan), plan.processes, rank, even_batches=False)
        batches = [[unpack_key(key)[1] for key in batch] for batch in shard]
        assert len(shard) == len(batches)
        parts.append(batches)
    return parts


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("samples", [3, 16, 32, 33, 34, 35, 47, 48, 49, 63, 96, 97])
def test_through_accelerates_shards(samples: int, processes: int) -> None:
    for batch_size in (1, 5, 16):
        plan = BatchPlan(samples, processes, batch_size, 1)
        parts = shards(plan)
        assert {len(batches) for batches in parts} == {plan.micro_batches}
        assert [[len(batch) for batch in batches] for batches in parts] == [
            [plan.share(micro, rank) for micro in range(plan.micro_batches)] for rank in range(processes)
        ]
        # One by one: the ranks' parts of a global batch, put together in turn, are the next piece of the one global order.
        dealt = [
            index
            for micro in range(plan.micro_batches)
            for turn in zip_longest(*(batches[micro] for batches in parts))
            for index in turn
            if index is not None
        ]
        assert dealt == order(samples, 0, 0)[: samples - plan.dropped]
        assert len(set(dealt)) == len(dealt) == samples - plan.dropped


@pytest.mark.parametrize("samples", [48, 51, 64, 71])
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_global_batch_holds_the_same_images_for_any_number_of_processes(samples: int, epoch: int) -> None:
    """Global batch 24: 1 x 24, 2 x 12, 3 x 8. Where nothing is dropped, an epoch is the same training."""
    global_batches = []
    for processes in (1, 2, 3):
        plan = BatchPlan(samples, processes, 24 // processes, 1)
        assert plan.dropped == 0
        parts = shards(plan, epoch)
        global_batches.append([sorted(index for batches in parts for index in batches[micro]) for micro in range(plan.micro_batches)])
    assert global_batches[0] == global_batches[1] == global_batches[2]


def test_the_number_of_batches_is_a_multiple_of_the_processes() -> None:
    """Else Accelerate would have something left to fill up or to deal out unevenly."""
    for plan in PLANS:
        batches = RankBatchSampler(EpochSampler(plan.samples, 0), plan)
        assert len(batches) == len(list(batches)) == plan.micro_batches * plan.processes
