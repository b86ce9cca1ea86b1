"""Adding gradients: one by one or in buckets, and how an all-reduce works.

An all-reduce leaves the sum of everyone's tensor with everyone. In a ring each process only sends
to the next. A tensor is split into N chunks, which go round once to be added and once more to be
handed out. So each process sends 2 (N - 1) / N times its size, however many processes there are
(Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002). Each call also takes a fixed time, so
small tensors are put into buckets first.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    Messages,
    batch,
    claim,
    compare,
    expect,
    flat_gradient,
    random_tensor,
    rank_rows,
    show,
    show_measured,
    small_gpt,
)


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    chunks = tensor.flatten().tensor_split(size)  # views of one memory
    buffer = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for turn in range(2 * (size - 1)):
        outgoing = chunks[(rank - turn) % size]
        target = chunks[(rank - turn - 1) % size]
        received = buffer[: target.numel()]
        sending = dist.P2POp(dist.isend, outgoing, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        if turn < size - 1:  # reduce-scatter, after which this rank has the sum of one chunk
            target.add_(received)
        else:  # all-gather: hand the sums round
            target.copy_(received)


def main() -> None:
    """Compare a ring with torch's all-reduce, and many all-reduces with one."""
    accelerator = start_accelerator()
    check(ring_all_reduce, accelerator.num_processes, seed=0)
    _compare_many_with_one(accelerator)


def check(all_reduce: Callable[[torch.Tensor], object], processes: int, seed: int) -> None:
    """Add up a tensor by a ring and by torch, and count the bytes that the ring sends.

    Args:
        all_reduce: the ring. It replaces a tensor by its sum over all ranks.
        processes: the number of ranks.
        seed: chooses the tensor.
    """
    rank = dist.get_rank()
    length = 6 * random.Random(seed).randrange(20_000, 50_000) + 5  # not divisible by 2 or 3
    tensor = random_tensor(length, seed=seed, rank=rank)
    by_ring = tensor.clone()
    by_torch = tensor.clone()
    with Messages() as messages:
        all_reduce(by_ring)
    dist.all_reduce(by_torch)

    is_rest = torch.arange(length) >= length // processes * processes
    without_rest = torch.where(is_rest, tensor, by_torch)
    mean = by_torch / processes
    compare(by_ring, by_torch, own=[tensor], mean=[mean], remainder=[without_rest])
    claim(
        "the ring's sum and torch's all_reduce differ by less than 1e-5",
        torch.allclose(by_ring, by_torch, rtol=0, atol=1e-5),
    )

    expect(not messages.collectives, "collective", names=messages.collectives)
    for receiver, _ in messages.sent:
        expect(receiver == (rank + 1) % processes, "receiver", receiver=receiver)
    share = sum(sent_bytes for _, sent_bytes in messages.sent) / tensor.nbytes
    bound = 2 * (processes - 1) / processes
    # Chunks of equal length need a few elements more, and so do the ranks with the longest chunks.
    expect(abs(share - bound) < 1e-3, "bytes", share=f"{share:.3f}", bound=f"{bound:.3f}")
    of_first_rank = by_ring.clone()
    dist.broadcast(of_first_rank, src=0)
    assert torch.equal(by_ring, of_first_rank), "the bits differ between the ranks"
    show(
        f"each of {processes} processes sent {share:.3f} times the tensor; "
        f"2 (N - 1) / N is {bound:.3f}"
    )


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
