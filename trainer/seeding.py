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

# Fibonacci hashing's constant, 2**64 divided by the golden ratio, as a signed number (Knuth, The Art of Computer Programming 3, 6.4).
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


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


def uniform(seed: int, keys: Tensor, count: int) -> Tensor:
    """`count` numbers of [0, 1) for each key, float32 (B, count): the same on every device, whatever stands beside the key in the batch.

    SplitMix64 (Steele, Lea, Flood 2014), whose finalizer is applied twice: to the key, and to its sum with the draw's number; the
    upper 24 bits, all that a float32 holds, make the number.

    Args:
        seed: of the stream.
        keys: int64 (B,).
    """
    numbers = torch.arange(1, count + 1, device=keys.device) * GOLDEN
    bits = _mix(_mix(keys + seed)[:, None] + numbers)
    return _shift_right(bits, 40).float() * 2.0**-24


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """As if unsigned: int64's own shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mix(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shift_right(numbers, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ _shift_right(numbers, 27)) * (0x94D049BB133111EB - 2**64)
    return numbers ^ _shift_right(numbers, 31)
