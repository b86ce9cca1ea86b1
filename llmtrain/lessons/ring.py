"""Adding gradients: one by one or in buckets, and how an all-reduce works.

An all-reduce leaves the sum of everyone's tensor with everyone. In a ring each process only sends
to the next. A tensor is split into N chunks, which go round once to be added and once more to be
handed out. So each process sends 2 (N - 1) / N times its size, however many processes there are
(Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002). Each call also takes a fixed time, so
small tensors are put into buckets first.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    batch,
    claim,
    flat_gradient,
    rank_rows,
    show,
    show_measured,
    small_gpt,
)


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace a tensor by its sum over all ranks.

    Returns:
        The bytes that this rank has sent.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    chunks = tensor.flatten().tensor_split(size)  # views of one memory
    buffer = torch.empty_like(chunks[0])  # no chunk is longer than the first
    sent_bytes = 0
    for turn in range(2 * (size - 1)):
        outgoing = chunks[(rank - turn) % size]
        target = chunks[(rank - turn - 1) % size]
        received = buffer[: target.numel()]
        sending = dist.P2POp(dist.isend, outgoing, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        sent_bytes += outgoing.nbytes
        if turn < size - 1:  # reduce-scatter, after which this rank has the sum of one chunk
            target.add_(received)
        else:  # all-gather: hand the sums round
            target.copy_(received)
    return sent_bytes


def main() -> None:
    """Compare a ring with torch's all-reduce, and many all-reduces with one."""
    accelerator = start_accelerator()
    _compare_ring_with_torch(accelerator)
    _compare_many_with_one(accelerator)


def _compare_ring_with_torch(accelerator: Accelerator) -> None:
    """Add up a tensor in both ways, and count the bytes that the ring sends."""
    size = accelerator.num_processes
    torch.manual_seed(accelerator.process_index)
    tensor = torch.randn(1_000_003)  # the number of ranks does not divide its size
    by_ring = tensor.clone()
    by_torch = tensor.clone()
    sent_bytes = ring_all_reduce(by_ring)
    dist.all_reduce(by_torch)
    claim(
        "the ring's sum and torch's all_reduce differ by less than 1e-5",
        torch.allclose(by_ring, by_torch, rtol=0, atol=1e-5),
    )
    of_all_ranks = accelerator.gather(by_ring[None])
    assert bool((of_all_ranks == by_ring).all()), "the bits differ between the ranks"

    share = sent_bytes / tensor.nbytes
    bound = 2 * (size - 1) / size
    show(
        f"each of {size} processes sent {share:.3f} times the tensor; 2 (N - 1) / N is {bound:.3f}"
    )
    # Some ranks send a longer chunk than others, but in every turn all chunks are on their way.
    sent_by_all = accelerator.gather(torch.tensor([sent_bytes])).sum().item()
    assert sent_by_all == 2 * (size - 1) * tensor.nbytes


def _compare_many_with_one(accelerator: Accelerator) -> None:
    """Add up gradients one by one, and all at once in a bucket."""
    model = small_gpt(n_layer=4)
    model(**batch(rank_rows(accelerator, 16))).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    bucket = flat_gradient(model)
    _all_reduce(gradients)
    _all_reduce([bucket])
    claim(
        f"one all-reduce for each of {len(gradients)} gradients, or one for all in a bucket: "
        "the sums are the same",
        torch.allclose(flat_gradient(model), bucket, atol=1e-4),
    )

    many_seconds = statistics.median(_all_reduce(gradients) for _ in range(15))
    one_seconds = statistics.median(_all_reduce([bucket]) for _ in range(15))
    many = f"{len(gradients)} all-reduces {1000 * many_seconds:.2f} ms"
    show_measured(f"{many}, one for all {1000 * one_seconds:.2f} ms")


def _all_reduce(tensors: Sequence[torch.Tensor]) -> float:
    """Sum each tensor over the ranks, in place; return the seconds that it took."""
    dist.barrier()
    start = time.perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor)
    return time.perf_counter() - start
