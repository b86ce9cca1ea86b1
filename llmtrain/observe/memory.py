"""Memory that a process uses while it trains."""

import psutil
import torch


def memory_used(device: torch.device) -> tuple[str, int]:
    """Return the kind of memory, ``gpu`` or ``host``, and how many bytes this process uses.

    On a GPU, these are the most bytes that were allocated since the last call. Otherwise they are
    the bytes of host memory that the process uses now.
    """
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return "gpu", peak_bytes
    return "host", psutil.Process().memory_info().rss
