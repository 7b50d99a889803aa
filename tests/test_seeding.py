"""One seed, and numbers derived from it that do not collide, do not change and do not leak."""

import contextlib
import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from trainer.seeding import derive_seed, seed_process, seeded


@pytest.fixture(autouse=True)
def _generators_of_the_other_tests() -> Iterator[None]:
    state = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(state[0])
    numpy.random.set_state(state[1])
    random.setstate(state[2])


def draws() -> tuple[float, float, float]:
    return float(torch.rand((), dtype=torch.float64)), float(numpy.random.rand()), random.random()


def test_no_two_purposes_epochs_ranks_and_seeds_share_a_number() -> None:
    words = [(purpose, epoch, rank) for purpose in ("order", "process", "augment") for epoch in range(40) for rank in range(16)]
    numbers = [derive_seed(seed, *word) for seed in (0, 1, 2, 2**63 - 1) for word in words]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**63 for number in numbers)
    assert max(numbers) > 2**62, "the upper bit is used too"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 1), (0, "1")),
        ((0, 1, 2), (0, 12)),
        ((0, "a", "b"), (0, "ab")),
        ((0, "a", "b"), (0, "b", "a")),
        ((1, 0), (0, 1)),
        ((0,), (0, 0)),
        ((0, "order", 1), (1, "order", 0)),
    ],
)
def test_words_are_told_apart_by_type_place_and_number(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert derive_seed(*one) != derive_seed(*other)


KNOWN = {(0, "init"): 2288809853432069196, (0, "order", 0): 2703634735336413163, (7, "augment", 3, 59999): 2102966203538980639}


@pytest.mark.parametrize("words", KNOWN)
def test_the_numbers_never_change(words: tuple[int, ...]) -> None:
    """A published run repeats only while they do not. (Python's own hash() of a text would differ in each process.)"""
    assert derive_seed(*words) == KNOWN[words]


@pytest.mark.parametrize("number", [0, 5, 2**32, 2**63 - 1])
def test_seeded_repeats_inside_and_changes_nothing_outside(number: int) -> None:
    seed_process(1)
    expected = [draws(), draws()]
    seed_process(1)
    first = draws()
    inside = []
    for _ in range(2):
        with seeded(number):
            inside.append((draws(), draws()))
    assert [first, draws()] == expected
    assert inside[0] == inside[1]
    assert len({value for pair in inside[0] for value in pair}) == 6


def test_seeded_restores_after_an_error_and_when_nested() -> None:
    seed_process(1)
    expected = [draws(), draws()]
    seed_process(1)
    first = draws()
    with contextlib.suppress(ZeroDivisionError), seeded(2):
        draws()
        raise ZeroDivisionError
    with seeded(2):
        outer = draws()
        with seeded(3):
            assert draws() != outer
        after = draws()
    assert [first, draws()] == expected
    with seeded(2):
        assert [draws(), draws()] == [outer, after]


def test_different_numbers_draw_differently() -> None:
    seen = set()
    for number in range(50):
        with seeded(number):
            seen |= set(draws())
    assert len(seen) == 150


def test_seed_process_seeds_all_three_for_good() -> None:
    seed_process(9)
    first = [draws(), draws()]
    seed_process(9)
    assert [draws(), draws()] == first
    with seeded(9):
        assert draws() == first[0]
