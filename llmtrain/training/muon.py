"""Muon: momentum, made orthogonal, for matrices.

It is by Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. ``torch.optim.Muon`` always
computes in bfloat16, whose rounding makes two layouts of one run differ: after 20 steps their
weights are 1e-3 apart. Here products have the precision of the run. In float32 two layouts stay as
close as with AdamW, and in bfloat16 it takes less time, because matrices of one shape go together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import full_tensor, local_shard, shard_like

# The coefficients of Jordan et al.: steepest at zero, and near one for values that have grown.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

# Numbers in a batch of matrices that are made orthogonal at once. A larger matrix is a batch.
_TOGETHER = {"cpu": 1 << 22, "cuda": 1 << 28}


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Its updates are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), so AdamW's learning
    rates and decays fit. The momentum of a sharded matrix is gathered, made orthogonal on every
    rank alike, and sharded again.

    Args:
        dtype: of the matrix products; by default, that of the gradients.
        ranks: all ranks, if they have the same gradients and share the work: each makes some of the
            matrices orthogonal, and all gather the results.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.9,
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "dtype": dtype}
        )
        self.ranks = ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        in_flight: _Update | None = None
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for matrices in batches_of(with_gradient):
                update = self._begin(matrices, group)
                # While the ranks send these results, apply those of the batch before.
                if in_flight is not None:
                    in_flight.finish()
                in_flight = update
                if update.work is None:
                    update.finish()
                    in_flight = None
        if in_flight is not None:
            in_flight.finish()

    def _begin(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> "_Update":
        """Compute the orthogonal momenta of a batch of matrices, or begin to gather them."""
        momenta = torch.stack(
            [_wide(full_tensor(self._nesterov(p, group["momentum"]))) for p in matrices]
        )
        momenta = momenta.to(group["dtype"] or momenta.dtype)
        results, work = self._orthogonal(momenta)
        return _Update(matrices, group["lr"], group["weight_decay"], results, work)

    def _orthogonal(self, momenta: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Return :func:`orthogonal` of [N, m, n], and the gathering to wait for, if there is one.

        The results may be followed by others, of no matrix.
        """
        # With fewer matrices than ranks, sending them would cost more than sharing saves.
        sharing = self.ranks.world_size if self.ranks is not None else 1
        if self.ranks is None or sharing == 1 or len(momenta) < sharing:
            return orthogonal(momenta), None

        share = -(-len(momenta) // sharing)
        start = self.ranks.rank * share
        own_momenta = momenta[start : start + share]
        own_results = momenta.new_zeros(share, *momenta.shape[1:])
        if len(own_momenta):
            own_results[: len(own_momenta)] = orthogonal(own_momenta)

        results = own_results.new_empty(sharing * share, *momenta.shape[1:])
        shares = list(torch.split(results, share))
        return results, dist.all_gather(shares, own_results, async_op=True)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> torch.Tensor:
        """Update the momentum of a matrix; return it with Nesterov's look ahead."""
        assert p.grad is not None
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer = self.state[p]["momentum_buffer"]
        # `lerp` computes the same, and takes five times as long on a CPU.
        buffer.mul_(momentum).add_(p.grad, alpha=1 - momentum)
        return p.grad.mul(1 - momentum).add_(buffer, alpha=momentum)


@dataclass
class _Update:
    """The update of a batch of matrices, which may still be on its way from other ranks."""

    matrices: list[nn.Parameter]
    lr: float
    weight_decay: float
    results: torch.Tensor  # [N, m, n], m at most n; N may be larger than the number of matrices
    work: dist.Work | None

    def finish(self) -> None:
        """Wait for the results, and apply them."""
        if self.work is not None:
            self.work.wait()
        for p, wide in zip(self.matrices, self.results, strict=False):
            full_update = wide if p.shape == wide.shape else wide.mT
            # The root mean square of AdamW's updates is about 0.2.
            scale = 0.2 * max(p.shape) ** 0.5
            shard = local_shard(p)
            update = shard_like(full_update, p).to(shard)
            shard.mul_(1 - self.lr * self.weight_decay).add_(update, alpha=-self.lr * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return an approximation of U V' for every matrix U S V' of [N, m, n], m at most n.

    Five iterations of Newton and Schulz bring singular values that are larger than 0.002 of the
    norm to between 0.7 and 1.2.
    """
    a, b, c = _QUINTIC
    x: torch.Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix that has at most as many rows as columns: this one, or its transpose."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def batches_of(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield batches of matrices that have one shape, or its transpose, and are not too large."""
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)

    for same_shape in by_shape.values():
        device = same_shape[0].device.type
        most_numbers = _TOGETHER.get(device, _TOGETHER["cpu"])
        count = max(1, most_numbers // same_shape[0].numel())
        for start in range(0, len(same_shape), count):
            yield same_shape[start : start + count]
