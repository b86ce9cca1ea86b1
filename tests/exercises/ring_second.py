import torch
import torch.distributed as dist


def all_reduce(tensor: torch.Tensor) -> None:
    """Pass one piece after the other on: while it collects, and then while it hands out."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    # Every N-th element is a piece, so lengths differ by at most one. Rank r begins with piece r.
    pieces = [tensor[first::size] for first in range(size)]
    hand = pieces[rank].clone()
    for hop in range(1, 2 * size - 1):
        piece = pieces[(rank - hop) % size]
        sent = dist.isend(hand, (rank + 1) % size)
        hand = torch.empty_like(piece, memory_format=torch.contiguous_format)
        dist.recv(hand, (rank - 1) % size)
        sent.wait()
        if hop < size:
            hand += piece
        if hop >= size - 1:
            piece.copy_(hand)
