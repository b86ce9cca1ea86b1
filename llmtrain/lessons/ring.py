"""Adding gradients: tensor by tensor, in buckets, and what an all-reduce is made of.

An all-reduce leaves the sum of everyone's tensor with everyone. In a ring each process only ever sends to the next: a
tensor is cut into N pieces, which go round once to be added and once more to be handed out, so that each process sends
2 (N - 1) / N of its size, however many there are (Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002). Each
call costs time of its own; so small tensors are put into buckets first.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, gradients, measured, rows, show, small_gpt

PROCESSES = 4


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace ``tensor`` by the sum over all processes; returns the bytes that this one sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = list(tensor.flatten().tensor_split(size))  # the parts of one memory
    incoming = torch.empty_like(pieces[0])  # the first is the longest
    sent = 0

    def pass_on(give: int, take: int, add: bool) -> None:
        nonlocal sent
        outgoing, arrived = pieces[give % size], incoming[: pieces[take % size].numel()]
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
                dist.P2POp(dist.irecv, arrived, (rank - 1) % size),
            ]
        )
        for request in requests:
            request.wait()
        sent += outgoing.nbytes
        if add:
            pieces[take % size].add_(arrived)
        else:
            pieces[take % size].copy_(arrived)

    for turn in range(size - 1):  # reduce-scatter: then piece rank + 1 is complete here
        pass_on(give=rank - turn, take=rank - turn - 1, add=True)
    for turn in range(size - 1):  # all-gather: hand the complete ones round
        pass_on(give=rank - turn + 1, take=rank - turn, add=False)
    return sent


def main() -> None:
    accelerator = start_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(rank)
    mine = torch.randn(1_000_003)  # which does not divide
    ours, theirs = mine.clone(), mine.clone()
    sent = ring_all_reduce(ours)
    dist.all_reduce(theirs)
    apart = float((ours - theirs).abs().max())
    show(f"the ring's sum and torch's all_reduce differ by less than 1e-5: {apart < 1e-5}")
    assert apart < 1e-5
    everyone = accelerator.gather(ours[None])
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))
    share, bound = sent / mine.nbytes, 2 * (size - 1) / size
    show(f"each of {size} processes sent {share:.3f} times the tensor; 2 (N - 1) / N is {bound:.3f}")
    assert abs(share / bound - 1) < 1e-4

    model = small_gpt(n_layer=4)
    model(**batch(rows(16)[rank * 4 :][:4])).backward()
    each = gradients(model)
    bucket = torch.cat([gradient.flatten() for gradient in each])
    for gradient in each:
        dist.all_reduce(gradient)
    dist.all_reduce(bucket)
    same = all(
        torch.allclose(a.flatten(), b, atol=1e-4)
        for a, b in zip(each, bucket.split([g.numel() for g in each]), strict=True)
    )
    show(f"{len(each)} gradients, one all-reduce for each or one for all in a bucket: the same sums: {same}")
    assert same
    one, many = _seconds(lambda: dist.all_reduce(bucket)), _seconds(lambda: [dist.all_reduce(g) for g in each])
    measured(f"{len(each)} all-reduces {1000 * many:.2f} ms, one for all {1000 * one:.2f} ms")


def _seconds(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(15):
        dist.barrier()
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
