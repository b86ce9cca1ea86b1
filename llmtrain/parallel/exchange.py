"""What is sent of a bucket of gradients: DDP's communication hooks.

Exact, as DDP does without a hook, or less than that: approximate by design. What one of these leaves out of an update
and owes to the next ones is part of the run, and so of its checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.console import say

Sum = torch.futures.Future[torch.Tensor]  # of the bucket's buffer, averaged over the processes
Watcher = Callable[[Any, Callable[[Any], Sum], int], Sum]


class Exchange:
    """Averages buckets over all processes, with the same result as DDP without a hook. The base of the others."""

    approximate = ""  # in what, as the banner says it

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.exact = False  # for the time being

    def __call__(self, state: None, bucket: dist.GradBucket) -> Sum:
        send = all_reduce if self.exact else self.send
        return send(bucket) if self.watcher is None else self.watcher(bucket, send, self.sent_bytes(bucket))

    def send(self, bucket: dist.GradBucket) -> Sum:
        return all_reduce(bucket)

    def sent_bytes(self, bucket: dist.GradBucket) -> int:
        """Of this bucket, that are added up over the processes."""
        return bucket.buffer().nbytes

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What it carries from update to update, as ``{parameter name}.{key}``, the same on every process, which all
        call this; and go on from it, so that a run that is resumed does the same."""
        return {}

    def keep(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Take what :meth:`tensors` gave from a checkpoint's tensors; the others are passed on."""
        return (item for item in tensors if item[0].rpartition(".")[2] not in _CARRIED)


class Half(Exchange):
    """Sends buckets rounded to 16 bits, and adds them up in these: half the bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.approximate = f"gradients are added up in {str(dtype).removeprefix('torch.')}"

    def send(self, bucket: dist.GradBucket) -> Sum:
        return all_reduce(bucket, self.dtype)

    def sent_bytes(self, bucket: dist.GradBucket) -> int:
        return bucket.buffer().numel() * self.dtype.itemsize


class PowerSGD(Exchange):
    """Sends a matrix as the product of two thin ones, and adds what that leaves out to the next update's gradient.

    Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019, arXiv:1905.13727), algorithms 1 and 2. Torch's own hook waits
    for one collective in the callback of another, in an order that may differ between processes, and keeps its state
    by bucket. Here all collectives are begun by the backward pass, in the order of the buckets, and the state is kept
    by parameter: P of a bucket is sent when it is full, Q of all of them after the last. What is left out depends on
    the mean of what the processes owe, not on who owes what; so a checkpoint holds the mean, for any number of them.
    """

    rank = 4  # columns of P and Q
    approximate = f"gradients of matrices are sent with rank {rank}, and what is left out with the next update's"

    def __init__(self) -> None:
        super().__init__()
        self.owed: dict[nn.Parameter, torch.Tensor] = {}  # [n, m], of this process
        self.q: dict[nn.Parameter, torch.Tensor] = {}  # [m, rank], of the last update; the same on every process
        self._waiting: list[_Bucket] = []

    def send(self, bucket: dist.GradBucket) -> Sum:
        taken = _Bucket(bucket, [p for p in bucket.parameters() if self._is_worth_it(p)])
        for parameter, matrix in taken.matrices.items():
            if parameter in self.owed:
                matrix.add_(self.owed[parameter])
            if parameter not in self.q:
                self.q[parameter] = _random(matrix.shape[1], self.rank, matrix)
        products = [matrix @ self.q[parameter] for parameter, matrix in taken.matrices.items()]
        taken.first = torch.cat([t.flatten() for t in (*products, *taken.others)])
        taken.work = dist.all_reduce(taken.first, async_op=True)
        self._waiting.append(taken)
        if bucket.is_last():
            self._finish()
        return taken.sum

    def _finish(self) -> None:
        """All P are under way: make them orthogonal, send Q, and put the gradients together."""
        size = dist.get_world_size()
        ps: dict[nn.Parameter, torch.Tensor] = {}
        for taken in self._waiting:
            taken.work.wait()
            shapes = [(len(matrix), self.rank) for matrix in taken.matrices.values()]
            parts = _cut(taken.first, [*shapes, *(other.shape for other in taken.others)])
            for parameter, p in zip(taken.matrices, parts, strict=False):
                ps[parameter] = torch.linalg.qr(p).Q
            for other, total in zip(taken.others, parts[len(shapes) :], strict=True):
                other.copy_(total / size)
        matrices = {parameter: matrix for taken in self._waiting for parameter, matrix in taken.matrices.items()}
        if matrices:
            qs = torch.cat([(matrix.T @ ps[parameter]).flatten() for parameter, matrix in matrices.items()])
            dist.all_reduce(qs)
            qs /= size
            sums = _cut(qs, [(matrix.shape[1], self.rank) for matrix in matrices.values()])
            for (parameter, matrix), q in zip(matrices.items(), sums, strict=True):
                sent = ps[parameter] @ q.T
                owed = self.owed.get(parameter, torch.zeros_like(matrix))
                fine = torch.isfinite(sent).all()  # else no update is made: all stays as it was, on all processes alike
                self.q[parameter] = torch.where(fine, q, self.q[parameter])
                self.owed[parameter] = torch.where(fine, matrix - sent, owed)
                matrix.copy_(sent)
        waiting, self._waiting = self._waiting, []
        for taken in waiting:
            taken.sum.set_result(taken.buffer)

    def _is_worth_it(self, parameter: torch.Tensor) -> bool:
        """Whether both factors together are at most half of a matrix, and neither is wider than it."""
        if parameter.ndim < 2:
            return False
        n = len(parameter)
        m = parameter.numel() // n
        return self.rank <= min(n, m) and 2 * self.rank * (n + m) <= n * m

    def sent_bytes(self, bucket: dist.GradBucket) -> int:
        def numbers(p: torch.Tensor) -> int:
            return self.rank * (len(p) + p.numel() // len(p)) if self._is_worth_it(p) else p.numel()

        return sum(numbers(p) * p.element_size() for p in bucket.parameters())

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        average(self.owed[p] for p in model.parameters() if p in self.owed)
        names = {name: p for name, p in model.named_parameters() if p in self.owed}
        return {f"{name}.{_OWED}": self.owed[p] for name, p in names.items()} | {
            f"{name}.{_Q}": self.q[p] for name, p in names.items()
        }

    def keep(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        parameters, alone = dict(model.named_parameters()), not dist.is_initialized()
        if alone:
            say("exchange", "one process sends nothing: what was owed to the next updates is dropped")
        for key, tensor in tensors:
            name, _, entry = key.rpartition(".")
            if entry not in _CARRIED:
                yield key, tensor
                continue
            if alone:
                continue
            parameter = parameters[name]
            held = tensor.to(parameter.device, parameter.dtype, copy=True)
            (self.owed if entry == _OWED else self.q)[parameter] = held


_OWED, _Q = "powersgd_owed", "powersgd_q"
_CARRIED = (_OWED, _Q)

EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "none": Exchange,
    "bf16": lambda: Half(torch.bfloat16),
    "fp16": lambda: Half(torch.float16),
    "powersgd": PowerSGD,
}


class _Bucket:
    """A bucket that is full and not yet sent to the end."""

    first: torch.Tensor  # P of its matrices and all of the others, one after the other
    work: dist.Work

    def __init__(self, bucket: dist.GradBucket, chosen: list[torch.Tensor]) -> None:
        self.buffer = bucket.buffer()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        wanted = {id(parameter) for parameter in chosen}
        self.matrices: dict[Any, torch.Tensor] = {p: g.view(len(g), -1) for p, g in pairs if id(p) in wanted}
        self.others = [g for p, g in pairs if id(p) not in wanted]
        self.sum: Sum = torch.futures.Future(devices=[self.buffer.device] if self.buffer.is_cuda else None)


def all_reduce(bucket: dist.GradBucket, dtype: torch.dtype | None = None) -> Sum:
    """The mean over all processes; added up in ``dtype``, where that is another than the bucket's own."""
    buffer = bucket.buffer()
    sent = buffer.mul_(1 / dist.get_world_size())  # as DDP does: divided first, so that 16 bits do not overflow
    if dtype is not None:
        sent = buffer.to(dtype)
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] if dtype is None else buffer.copy_(done.value()[0]))


def average(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each, in place, by its mean over all processes, which all call this with the same tensors."""
    if not dist.is_initialized():
        return
    kept = [tensor.detach() for tensor in tensors]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in kept]:
        work.wait()
    for tensor in kept:
        tensor.div_(dist.get_world_size())


def _random(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The same on every process."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(like)


def _cut(flat: torch.Tensor, shapes: list[Any]) -> list[torch.Tensor]:
    pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
