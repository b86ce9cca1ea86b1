"""Muon: momentum that is made orthogonal, for matrices.

See Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. ``torch.optim.Muon`` always
computes in bfloat16. Its rounding makes two layouts of one run differ: after 20 steps their weights
are 1e-3 apart. Here products have the precision of the run. In float32 two layouts stay as close as
with AdamW. In bfloat16 this class takes less time than torch's, because it multiplies matrices of
the same shape in one batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import local_shard, shard_like
from llmtrain.training.adamw import assign, needs_compensation, update_weights

# The coefficients of Jordan et al.: steepest at zero, and near one for values that have grown.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

# The most numbers in a batch of matrices. A larger matrix is a batch by itself.
_BATCH_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 28}


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Its updates are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), so AdamW's learning
    rates and weight decays fit. The momentum of a sharded matrix is gathered, made orthogonal on
    every rank, and sharded again. Like torch's fused AdamW, it can skip a step on the device; see
    :func:`llmtrain.training.step.can_skip_on_device`.

    Args:
        matrices: the parameters, each of two dimensions, or groups of them.
        lr: the learning rate.
        weight_decay: the decoupled weight decay.
        momentum: the decay of the mean of gradients.
        dtype: the dtype of matrix products; by default that of the gradients.
        ranks: all ranks, if they have the same gradients and divide the work. Each rank makes some
            of the matrices orthogonal, and all of them gather the results.
    """

    keeps_small_updates = True
    skips_on_device = True

    def __init__(
        self,
        matrices: list[nn.Parameter] | list[dict[str, Any]],
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

    @staticmethod
    def initial_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a matrix before its first step. It is sharded like the matrix."""
        dtype = torch.promote_types(p.dtype, torch.float32)
        state = {"momentum_buffer": torch.zeros_like(p, dtype=dtype)}
        if needs_compensation(p):
            state["compensation"] = torch.zeros_like(p)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)

        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for matrices in batches_of(with_gradient):
                skip = None
                if found_inf is not None:
                    skip = found_inf.to(matrices[0].device) > 0
                momenta = torch.stack([self._momentum(p, group, skip) for p in matrices])
                momenta = momenta.to(group["dtype"] or momenta.dtype)
                self._apply(matrices, group, self._orthogonal(momenta), skip)

    def _momentum(
        self, p: nn.Parameter, group: dict[str, Any], skip: torch.Tensor | None
    ) -> torch.Tensor:
        """Update the momentum of a matrix.

        Returns:
            The full Nesterov momentum, transposed if it has more rows than columns.
        """
        assert p.grad is not None
        momentum = group["momentum"]
        gradient = p.grad.to(torch.promote_types(p.dtype, torch.float32))
        if not self.state[p]:
            self.state[p].update(self.initial_state(p))
        buffer = self.state[p]["momentum_buffer"]
        # `lerp` computes the same result, but takes five times as long on a CPU.
        new_buffer = buffer.mul(momentum).add_(gradient, alpha=1 - momentum)
        assign(local_shard(buffer), local_shard(new_buffer), skip)

        nesterov = gradient.mul(1 - momentum).add_(new_buffer, alpha=momentum)
        if isinstance(nesterov, DTensor):
            nesterov = nesterov.full_tensor()
        return nesterov if nesterov.shape[0] <= nesterov.shape[1] else nesterov.mT

    def _orthogonal(self, momenta: torch.Tensor) -> torch.Tensor:
        """Make momenta [N, m, n] orthogonal, on this rank or on all ranks together.

        Returns:
            The results [N or more, m, n], of which the first N belong to the momenta.
        """
        # With fewer matrices than ranks, sending them would cost more than it saves.
        if self.ranks is None or not 1 < self.ranks.world_size <= len(momenta):
            return orthogonal(momenta)

        world_size = self.ranks.world_size
        share = -(-len(momenta) // world_size)
        start = self.ranks.rank * share
        own_momenta = momenta[start : start + share]
        own_results = momenta.new_zeros(share, *momenta.shape[1:])
        if len(own_momenta):
            own_results[: len(own_momenta)] = orthogonal(own_momenta)

        results = own_results.new_empty(world_size * share, *momenta.shape[1:])
        dist.all_gather(list(torch.split(results, share)), own_results)
        return results

    def _apply(
        self,
        matrices: list[nn.Parameter],
        group: dict[str, Any],
        results: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> None:
        """Update a batch of matrices.

        Args:
            matrices: parameters of one shape up to a transpose.
            group: their group.
            results: their orthogonal momenta [N, m, n], m at most n; N may exceed their number.
            skip: a boolean scalar. If it is true, nothing is changed.
        """
        lr = group["lr"]
        decay = 1 - lr * group["weight_decay"]
        for p, wide in zip(matrices, results, strict=False):
            full_update = wide if p.shape == wide.shape else wide.mT
            # The root mean square of AdamW's updates is about 0.2.
            scale = 0.2 * max(p.shape) ** 0.5
            shard = local_shard(p)
            dtype = torch.promote_types(shard.dtype, torch.float32)
            update = shard_like(full_update, p).to(shard.device, dtype)
            if needs_compensation(p):
                update_weights(
                    shard,
                    update * (-lr * scale),
                    decay=decay,
                    compensation=local_shard(self.state[p]["compensation"]),
                    skip=skip,
                )
            else:
                new_shard = shard.mul(decay).add_(update, alpha=-lr * scale)
                assign(shard, new_shard, skip)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return an approximation of U V' for each matrix U S V'.

    Five Newton-Schulz iterations bring singular values that are larger than 0.002 of the norm to
    between 0.7 and 1.2.

    Args:
        matrices: [N, m, n], m at most n.
    """
    a, b, c = _QUINTIC
    x: torch.Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def batches_of(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield batches, not too large, of matrices with the same shape up to a transpose."""
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)

    for same_shape in by_shape.values():
        device = same_shape[0].device.type
        max_numbers = _BATCH_NUMBERS.get(device, _BATCH_NUMBERS["cpu"])
        count = max(1, max_numbers // same_shape[0].numel())
        for start in range(0, len(same_shape), count):
            yield same_shape[start : start + count]


def iteration_bytes(matrices: list[nn.Parameter], in_bf16: bool) -> int:
    """Return the bytes of the iterations, which are made on full matrices.

    A process holds the updates in float32. In the precision of the products, it holds two
    approximations and two products for each update, and in bfloat16 a copy of the update.
    """
    element_bytes = 2 if in_bf16 else 4
    copies = 3 if in_bf16 else 2
    largest = 0
    for batch in batches_of(matrices):
        short, long = sorted(batch[0].shape)
        numel = len(batch) * short * long
        updates = 4 * numel
        approximations = copies * element_bytes * numel
        products = 2 * element_bytes * len(batch) * short**2
        largest = max(largest, updates + approximations + products)
    return largest
