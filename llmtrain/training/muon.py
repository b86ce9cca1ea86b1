"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, made orthogonal, for matrices.

``torch.optim.Muon`` always computes in bfloat16, whose rounding makes of two layouts of one run two runs: after 20
updates their weights differ by 1e-3. Here the products have the precision of the run's: in float32 two layouts stay as
near to each other as with AdamW, and in bfloat16 matrices of one shape, which go together, take less time.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.parallel.mesh import full_tensor, local_shard, shard_like

_QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)  # of Jordan et al.: steepest at zero, and near one for what has grown
_ITERATIONS = 5
_TOGETHER = {
    "cpu": 1 << 22,
    "cuda": 1 << 28,
}  # numbers in a batch of matrices; larger ones come alone


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Its updates are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), so that AdamW's learning rates and decays
    fit. The update of a sharded matrix is gathered, made orthogonal on every rank alike, and sharded again. Products
    are in ``dtype``; by default, that of the gradients. ``shared`` deals the matrices out to the ranks, all of which
    have the same gradients: each makes some orthogonal, and all gather the results.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.9,
        dtype: torch.dtype | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(
            matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype}
        )
        self.ranks = dist.get_world_size() if shared and dist.is_initialized() else 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        under_way: list[Callable[[], None]] = []
        for group in self.param_groups:
            for matrices in batches_of([p for p in group["params"] if p.grad is not None]):
                momenta = torch.stack(
                    [_wide(full_tensor(self._nesterov(p, group["momentum"]))) for p in matrices]
                )
                results, work = self._orthogonal(momenta.to(group["dtype"] or momenta.dtype))
                del momenta
                under_way.append(functools.partial(self._update, matrices, group, results, work))
                if (
                    len(under_way) > 1 or work is None
                ):  # while results are sent, those before are put to use
                    under_way.pop(0)()
        for update in under_way:
            update()

    def _orthogonal(self, momenta: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Return :func:`orthogonal` of [N, m, n], which the ranks may share, and what to wait for."""
        if (
            len(momenta) < self.ranks or self.ranks == 1
        ):  # with fewer, more would be sent than is saved
            return orthogonal(momenta), None
        each = -(-len(momenta) // self.ranks)
        mine = momenta[dist.get_rank() * each :][:each]
        sent = momenta.new_zeros(each, *momenta.shape[1:])
        if len(mine):
            sent[: len(mine)] = orthogonal(mine)
        results = sent.new_empty(self.ranks * each, *sent.shape[1:])
        return results, dist.all_gather(list(torch.split(results, each)), sent, async_op=True)

    def _update(
        self,
        matrices: list[nn.Parameter],
        group: dict[str, Any],
        results: torch.Tensor,
        work: dist.Work | None,
    ) -> None:
        lr, decay = group["lr"], group["lr"] * group["weight_decay"]
        if work is not None:
            work.wait()
        for p, wide in zip(matrices, results, strict=False):
            update = shard_like(wide if p.shape == wide.shape else wide.mT, p)
            size = 0.2 * max(p.shape) ** 0.5  # the root mean square of AdamW's updates is about 0.2
            part = local_shard(p)
            part.mul_(1 - decay).add_(update.to(part), alpha=-lr * size)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> torch.Tensor:
        assert p.grad is not None
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        # lerp computes the same, but on a CPU takes five times as long
        mean = self.state[p]["momentum_buffer"].mul_(momentum).add_(p.grad, alpha=1 - momentum)
        return p.grad.mul(1 - momentum).add_(mean, alpha=momentum)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return an approximation of U V' of every matrix U S V' of [N, m, n], m at most n.

    Singular values of more than 0.002 of the norm end between 0.7 and 1.2, by five iterations of Newton and Schulz.
    """
    a, b, c = _QUINTIC
    x: torch.Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def batches_of(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield matrices of one shape, or its transpose, that are updated together; not too many at once."""
    alike: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        alike.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    for some in alike.values():
        count = max(1, _TOGETHER.get(some[0].device.type, _TOGETHER["cpu"]) // some[0].numel())
        for start in range(0, len(some), count):
            yield some[start : start + count]
