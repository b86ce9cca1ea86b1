"""Sizes that recur, so that compiled code and a GPU's kernels meet few shapes."""


def padded_size(count: int, smallest: int = 64) -> int:
    """Return the smallest of a few sizes that holds ``count`` entries.

    Between two powers of two there are eight sizes: 64, 72, 80, ..., 128, 144, 160, ...

    Args:
        count: the number of entries.
        smallest: the smallest size, a power of two from 8 on.
    """
    step = max(1 << max(count - 1, 0).bit_length() >> 4, smallest // 8)
    return max(-(-count // step) * step, smallest)
