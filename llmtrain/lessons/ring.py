"""Adding gradients: tensor by tensor, in buckets, and what an all-reduce is made of.

An all-reduce leaves the sum of everyone's tensor with everyone. In a ring each process only ever sends to the next: a
tensor is split into N chunks, which go round once to be added and once more to be handed out, so that each process
sends 2 (N - 1) / N of its size, however many there are (Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002).
Each call costs time of its own; so small tensors are put into buckets first.
"""

import statistics
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, claim, gradient, measured, my_rows, show, small_gpt
from llmtrain.parallel.collectives import transfer

PROCESSES = 4


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace ``tensor`` by the sum over all ranks; returns the bytes that this one sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.flatten().tensor_split(size)  # views of one memory
    buffer = torch.empty_like(chunks[0])  # the first is the longest
    sent = 0
    for turn in range(2 * (size - 1)):
        give, take = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
        arrived = buffer[: take.numel()]
        sending = dist.P2POp(dist.isend, give, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, arrived, (rank - 1) % size)
        transfer([sending, receiving])
        sent += give.nbytes
        if turn < size - 1:  # reduce-scatter, after which this rank has the sum of one chunk
            take.add_(arrived)
        else:  # all-gather: hand the sums round
            take.copy_(arrived)
    return sent


def main() -> None:
    """Compare a ring with torch's all-reduce, and many all-reduces with one."""
    accelerator = start_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(rank)
    mine = torch.randn(1_000_003)  # which the number of ranks does not divide
    ours, theirs = mine.clone(), mine.clone()
    sent = ring_all_reduce(ours)
    dist.all_reduce(theirs)
    claim(
        "the ring's sum and torch's all_reduce differ by less than 1e-5",
        torch.allclose(ours, theirs, 0, 1e-5),
    )
    assert bool((accelerator.gather(ours[None]) == ours).all()), "the ranks have other bits"
    share, bound = sent / mine.nbytes, 2 * (size - 1) / size
    show(
        f"each of {size} processes sent {share:.3f} times the tensor; 2 (N - 1) / N is {bound:.3f}"
    )
    assert abs(share / bound - 1) < 1e-4

    model = small_gpt(n_layer=4)
    model(**batch(my_rows(accelerator, 16))).backward()
    each, bucket = [p.grad for p in model.parameters() if p.grad is not None], gradient(model)
    _all_reduce(each)
    _all_reduce([bucket])
    same = torch.allclose(gradient(model), bucket, atol=1e-4)
    claim(
        f"{len(each)} gradients, an all-reduce for each or one for all in a bucket: the same sums",
        same,
    )
    many, one = (
        statistics.median(_all_reduce(tensors) for _ in range(15)) for tensors in (each, [bucket])
    )
    measured(f"{len(each)} all-reduces {1000 * many:.2f} ms, one for all {1000 * one:.2f} ms")


def _all_reduce(tensors: Iterable[torch.Tensor]) -> float:
    """Sum each over the ranks, in place; returns the seconds that it took."""
    dist.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor)
    return time.perf_counter() - began
