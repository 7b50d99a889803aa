"""All randomness of a run derives from its one seed: `derive_seed(seed, purpose, ...)`."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def derive_seed(seed: int, *words: int | str) -> int:
    """One number in [0, 2**63) for a purpose, independent of every other purpose's number.

    Adding ranks or epochs to a seed (`seed + rank`) makes streams collide: rank 1 of seed 0 would be rank 0 of seed 1. A hash does not.

    Args:
        seed: the run's seed (`--seed`).
        words: what the number is for, for example `("order", epoch)` or `("process", epoch, rank)`.
    """
    text = "/".join(f"{type(word).__name__}:{word}" for word in (seed, *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed torch's CPU generator, numpy and random with `number` inside the block; outside it nothing has changed."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_process(number: int) -> None:
    """Seed this process's own generators for good: torch on every device, numpy and random."""
    torch.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)
