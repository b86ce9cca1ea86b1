"""The communication hooks of DDP: how a bucket of gradients is averaged.

Exact, as DDP does without a hook, or approximate by design. What an approximate one leaves out of an update and owes
to the next ones is part of the run, and so of its checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from llmtrain.console import say
from llmtrain.contract import Weights
from llmtrain.parallel.collectives import BucketMean

Watcher: TypeAlias = Callable[[GradBucket, Callable[[GradBucket], BucketMean], int], BucketMean]

_OWED, _Q = "powersgd_owed", "powersgd_q"


class Exchange:
    """Averages buckets over all ranks; with a ``dtype``, rounded to it, and summed in it.

    Without one the result is that of DDP without a hook. The base of the others.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.approximate = (
            f"gradients are added up in {str(dtype).removeprefix('torch.')}"  # for the banner
        )
        self.watcher: Watcher | None = None
        self.exact = False  # for the time being

    def __call__(self, state: None, bucket: GradBucket) -> BucketMean:
        send = _average_bucket if self.exact else self.send
        return (
            send(bucket)
            if self.watcher is None
            else self.watcher(bucket, send, self.sent_bytes(bucket))
        )

    def send(self, bucket: GradBucket) -> BucketMean:
        """Begin to average a bucket."""
        return _average_bucket(bucket, self.dtype)

    def sent_bytes(self, bucket: GradBucket) -> int:
        """Return the bytes of this bucket that are summed over the ranks."""
        return bucket.buffer().numel() * (self.dtype or bucket.buffer().dtype).itemsize

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what is carried from update to update, as ``{parameter name}.{key}``, the same on every rank.

        All ranks call this, and go on from what it returns, so that a run that is resumed does the same.
        """
        return {}

    def keep(self, model: nn.Module, tensors: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Take what :meth:`tensors` gave from a checkpoint's tensors; the others are passed on."""
        return (item for item in tensors if item[0].rpartition(".")[2] not in (_OWED, _Q))


class PowerSGD(Exchange):
    """Sends a matrix as the product of two thin ones, and adds what that leaves out to the next update's gradient.

    Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019, arXiv:1905.13727), algorithms 1 and 2. Torch's own hook waits
    for one collective in the callback of another, in an order that may differ between ranks, and keeps its state by
    bucket. Here all collectives are begun by the backward pass, in the order of the buckets, and the state is kept by
    parameter: P of a bucket is sent when it is full, Q of all of them after the last. What is left out depends on the
    mean of what the ranks owe, not on who owes what; so a checkpoint holds the mean, for any number of them.
    """

    rank = 4  # columns of P and Q

    def __init__(self) -> None:
        super().__init__()
        self.approximate = f"gradients of matrices are sent with rank {self.rank}, and what is left out with the next update's"
        self.owed: dict[torch.Tensor, torch.Tensor] = {}  # by parameter: [n, m], of this rank
        self.q: dict[
            torch.Tensor, torch.Tensor
        ] = {}  # by parameter: [m, rank], of the last update; same on every rank
        self._waiting: list[_Bucket] = []

    def send(self, bucket: GradBucket) -> BucketMean:
        taken = _Bucket(bucket, self.rank)
        for parameter, matrix in taken.matrices.items():
            if parameter in self.owed:
                matrix.add_(self.owed[parameter])
            if parameter not in self.q:  # the same random numbers on every rank
                generator = torch.Generator().manual_seed(matrix.shape[1])
                self.q[parameter] = torch.randn(matrix.shape[1], self.rank, generator=generator).to(
                    matrix
                )
        products = [matrix @ self.q[parameter] for parameter, matrix in taken.matrices.items()]
        taken.first = torch.cat([t.flatten() for t in (*products, *taken.others)])
        taken.work = dist.all_reduce(taken.first, async_op=True)
        self._waiting.append(taken)
        if bucket.is_last():
            self._finish()
        return taken.sum

    def _finish(self) -> None:
        """Make all P orthogonal, which are under way; send Q, and put the gradients together."""
        size, (waiting, self._waiting) = dist.get_world_size(), (self._waiting, [])
        ps: dict[torch.Tensor, torch.Tensor] = {}
        for taken in waiting:
            taken.work.wait()
            shapes = [torch.Size([len(matrix), self.rank]) for matrix in taken.matrices.values()]
            sums = _unflatten(taken.first, [*shapes, *(other.shape for other in taken.others)])
            ps |= {
                parameter: torch.linalg.qr(p).Q
                for parameter, p in zip(taken.matrices, sums, strict=False)
            }
            for other, total in zip(taken.others, sums[len(shapes) :], strict=True):
                other.copy_(total / size)
        matrices = {
            parameter: matrix for taken in waiting for parameter, matrix in taken.matrices.items()
        }
        if matrices:
            qs = torch.cat(
                [(matrix.T @ ps[parameter]).flatten() for parameter, matrix in matrices.items()]
            )
            dist.all_reduce(qs)
            sums = _unflatten(
                qs / size,
                [torch.Size([matrix.shape[1], self.rank]) for matrix in matrices.values()],
            )
            for (parameter, matrix), q in zip(matrices.items(), sums, strict=True):
                sent = ps[parameter] @ q.T
                owed = self.owed.get(parameter, torch.zeros_like(matrix))
                fine = torch.isfinite(
                    sent
                ).all()  # else no update is made: all stays as it was, on all ranks alike
                self.q[parameter] = torch.where(fine, q, self.q[parameter])
                self.owed[parameter] = torch.where(fine, matrix - sent, owed)
                matrix.copy_(sent)
        for taken in waiting:
            taken.sum.set_result(taken.buffer)

    def sent_bytes(self, bucket: GradBucket) -> int:
        thin = {
            p: self.rank * (len(p) + p.numel() // len(p))
            for p in bucket.parameters()
            if _is_worth(p, self.rank)
        }
        return sum(thin.get(p, p.numel()) * p.element_size() for p in bucket.parameters())

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        held = [(name, p) for name, p in model.named_parameters() if p in self.owed]
        average(self.owed[p] for _, p in held)
        return {
            f"{name}.{key}": of[p]
            for key, of in ((_OWED, self.owed), (_Q, self.q))
            for name, p in held
        }

    def keep(self, model: nn.Module, tensors: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        if not dist.is_initialized():
            say(
                "exchange",
                "one process sends nothing: what was owed to the next updates is dropped",
            )
        for name, tensor in tensors:
            parameter, _, key = name.rpartition(".")
            if key not in (_OWED, _Q):
                yield name, tensor
            elif dist.is_initialized():
                held = model.get_parameter(parameter)
                (self.owed if key == _OWED else self.q)[held] = tensor.to(
                    held.device, held.dtype, copy=True
                )


EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "none": Exchange,
    "bf16": partial(Exchange, torch.bfloat16),
    "fp16": partial(Exchange, torch.float16),
    "powersgd": PowerSGD,
}


class _Bucket:
    """A bucket that is full and not yet sent to the end."""

    first: torch.Tensor  # P of its matrices and all of the others, one after the other
    work: dist.Work

    def __init__(self, bucket: GradBucket, rank: int) -> None:
        self.buffer = bucket.buffer()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self.matrices = {
            p: gradient.view(len(p), -1) for p, gradient in pairs if _is_worth(p, rank)
        }
        self.others = [gradient for p, gradient in pairs if not _is_worth(p, rank)]
        self.sum: BucketMean = torch.futures.Future(
            devices=[self.buffer.device] if self.buffer.is_cuda else None
        )


def _is_worth(parameter: torch.Tensor, rank: int) -> bool:
    """Return whether both factors together are at most half of a matrix, and neither is wider than it."""
    if parameter.ndim < 2:
        return False
    n, m = len(parameter), parameter.numel() // len(parameter)
    return rank <= min(n, m) and 2 * rank * (n + m) <= n * m


def _average_bucket(bucket: GradBucket, dtype: torch.dtype | None = None) -> BucketMean:
    buffer = bucket.buffer().mul_(
        1 / dist.get_world_size()
    )  # as DDP does: first, so that 16 bits do not overflow
    total: BucketMean = dist.all_reduce(
        buffer.to(dtype or buffer.dtype), async_op=True
    ).get_future()
    return total.then(
        lambda done: done.value()[0] if dtype is None else buffer.copy_(done.value()[0])
    )


def average(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each, in place, by its mean over all ranks, which all call this with the same tensors."""
    if not dist.is_initialized():
        return
    kept = [tensor.detach() for tensor in tensors]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in kept]:
        work.wait()
    for tensor in kept:
        tensor.div_(dist.get_world_size())


def _unflatten(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    slices = flat.split_with_sizes([shape.numel() for shape in shapes])
    return [one.view(shape) for one, shape in zip(slices, shapes, strict=True)]
