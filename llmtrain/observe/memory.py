"""Memory that a process holds while it trains."""

import psutil
import torch


def memory_held(device: torch.device) -> tuple[str, int]:
    """Return where, and how many bytes.

    Of a GPU it is the most since this was last asked, else what the host holds for this process now.
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return "gpu", most
    return "host", psutil.Process().memory_info().rss
