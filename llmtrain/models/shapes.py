"""Sizes that recur, so that compiled code and a GPU's kernels meet few shapes."""


def padded_size(count: int) -> int:
    """Return the smallest of a few sizes that holds ``count`` entries.

    Between two powers of two there are eight sizes. The smallest is 64.
    """
    step = max(1 << max(count - 1, 0).bit_length() >> 4, 8)
    return max(-(-count // step) * step, 64)
