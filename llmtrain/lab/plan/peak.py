"""Measures the FLOP/s that a device reaches."""

import time

import torch

# Sizes of the square matrices whose product measures a device, and how often it is computed.
_SIZES_CPU = (192, 768)
_SIZES_GPU = (1024, 4096)
_REPEATS = 20


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product, the best of several."""
    best = 0.0
    for size in _SIZES_GPU if device.type == "cuda" else _SIZES_CPU:
        flops = 2 * size**3
        # If the larger product would take more than a second, this precision is emulated here.
        if best and _REPEATS * flops / best > 1:
            break

        a = torch.ones(size, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        float((a @ b)[0, 0])  # the first product loads the kernel
        for _ in range(_REPEATS):
            start = time.perf_counter()
            float((a @ b)[0, 0])  # reading the result waits for the device
            best = max(best, flops / (time.perf_counter() - start))
    return best
