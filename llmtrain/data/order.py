"""The order of the rows of an epoch: a permutation that can be entered anywhere.

The order is a keyed bijection of ``range(n)`` rather than a shuffled list, so that position ``p`` of epoch ``e`` costs
the same at any ``p``, needs no memory and is the same on every machine.
"""

import numpy as np

# Half of a block: 2**3 values at least, so that the smallest permutations too are drawn from a rich enough family.
_MIN_HALF_BITS = 3
_ROUNDS = 8
_U64 = np.uint64


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea & Flood 2014, OOPSLA): every input bit reaches every output bit."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    x = x ^ (x >> _U64(31))
    return x


def key_of(*numbers: int) -> int:
    """Return one 64-bit key from several integers, such as (seed, epoch)."""
    state = np.zeros(1, _U64)
    for number in numbers:
        state = mix(state + _U64(0x9E3779B97F4A7C15) + np.array([number & (2**64 - 1)], _U64))
    return int(state[0])


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the rows at ``positions`` of the permutation of ``range(n)`` that ``key`` chooses.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the next power of four; positions that land outside
    ``range(n)`` are sent through again until they fall inside (cycle walking: Black & Rogaway 2002, CT-RSA), which
    keeps it a bijection.

    Args:
        positions: integers in ``range(n)``, any shape.
    Returns:
        int64, the same shape.
    """
    half = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    mask, shift = _U64((1 << half) - 1), _U64(half)
    round_keys = [_U64(key_of(key, i)) for i in range(_ROUNDS)]

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        x = (left << shift) | right
        return x

    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        rows = feistel(np.atleast_1d(positions).astype(_U64))
        while (outside := rows >= n).any():
            rows[outside] = feistel(rows[outside])
    return rows.astype(np.int64).reshape(np.shape(positions))
