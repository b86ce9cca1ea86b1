"""Seeds: every random number of a run follows from its seed, a purpose and a number.

torch's generator of the CPU reads only the lower 32 bits of a seed (that of CUDA reads 64). So a
seed must not be put together by shifting or adding: all its bits, also the lower 32, have to depend
on everything that it is made of.
"""

import hashlib

import numpy as np

# The version of all random weights: models, adapters, rows of new tokens. A change of what is drawn
# for a seed raises it, so that no run goes on in its folder from weights that would differ today.
RANDOM_VERSION = 2

_U64 = np.uint64


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea & Flood 2014, OOPSLA) to uint64 values.

    Every input bit affects every output bit.
    """
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    x = x ^ (x >> _U64(31))
    return x


def key_of(*numbers: int) -> int:
    """Return a 64-bit key made from several integers, such as (seed, epoch)."""
    state = np.zeros(1, _U64)
    for number in numbers:
        state = mix(state + _U64(0x9E3779B97F4A7C15) + np.array([number & (2**64 - 1)], _U64))
    return int(state[0])


def seed_of(seed: int, *parts: int | str) -> int:
    """Return the seed of one purpose of a run.

    Args:
        seed: the seed of the run.
        parts: what the random numbers are for: names, such as that of a module, and numbers, such
            as that of a step or a prompt.

    Returns:
        A seed for ``torch.Generator.manual_seed``, of 63 bits.
    """
    numbers = []
    for part in parts:
        if isinstance(part, str):
            digest = hashlib.blake2b(part.encode(), digest_size=8).digest()
            numbers.append(int.from_bytes(digest, "little"))
        else:
            numbers.append(part)
    # A key has 64 bits. `manual_seed` and int64 columns take 63.
    return key_of(seed, *numbers) >> 1
