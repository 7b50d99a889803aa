"""All randomness of a run derives from its one seed: `derive_seed(seed, purpose, ...)`."""

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor


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


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of this process's generators, torch's on the CPU and on `device`, numpy's, random's, as tensors: no pickle is needed."""
    numpy_state: Any = numpy.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    assert name == "MT19937", name
    version, words, python_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        # random keeps every second normal deviate for the next call; none is NaN here.
        "python_gauss": torch.tensor(math.nan if python_gauss is None else python_gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Put this process's generators into `states`, as `generator_states` gave them; on another kind of device, that one stays as it is."""
    torch.set_rng_state(states["torch"])
    *keys, position, has_gauss = states["numpy"].tolist()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, float(states["numpy_gauss"])))
    version, *words = states["python"].tolist()
    gauss = float(states["python_gauss"])
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
