import torch
import torch.distributed as dist


def reduce_scatter(gradient: torch.Tensor) -> torch.Tensor:
    """Write each process's share of the mean into a table of zeros, and reduce its pages."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    rows, columns = gradient.shape
    share = (rows + size - 1) // size
    table = gradient.new_zeros(size, share, columns)
    table.view(-1, columns)[:rows] = gradient / size
    mine = gradient.new_empty(share, columns)
    dist.reduce_scatter(mine, list(table))
    return mine[: len(range(rows)[rank * share : (rank + 1) * share])]
