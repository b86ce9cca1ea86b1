"""AdamW for little memory: moments in 8 bits, weights in bfloat16, or both."""

from collections.abc import Iterable
from typing import Any

import torch

from llmtrain.parallel.shards import local_shard, zeros_by_row
from llmtrain.training.compensation import assign, needs_compensation, update_weights
from llmtrain.training.device_skip import found_inf_of
from llmtrain.training.eight_bit import (
    blocks_per_row,
    is_eight_bit,
    positive_codebook,
    signed_codebook,
)

# The most numbers that a step computes at a time. Each of them needs about 24 bytes of memory.
CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose state is small.

    It computes in float32. Weights may be float32, or bfloat16 with a compensation; see
    :mod:`llmtrain.training.compensation`. Moments may be kept in 8 bits; see
    :mod:`llmtrain.training.eight_bit`. Vectors and small matrices have moments in float32. Which
    ones are small is decided by the full shape, so the state does not depend on how parameters are
    sharded.

    Like torch's fused AdamW, it can skip a step on the device; see
    :mod:`llmtrain.training.device_skip`.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate.
        betas: the decay of the running means of gradients and of their squares.
        eps: is added to the root of the mean squared gradient.
        weight_decay: the decoupled weight decay.
    """

    # Whether the moments of large tensors are in 8 bits.
    eight_bit = False

    skips_on_device = True
    # torch.amp.GradScaler then passes `found_inf` to the step, instead of reading it on the host.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p].update(_initial_state(p, self.eight_bit))
                self._update(p, group)

    def _update(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Update one parameter, some of its rows at a time."""
        assert p.grad is not None
        found_inf = found_inf_of(self)
        grad_scale = getattr(self, "grad_scale", None)  # of a gradient scaler
        skip = None if found_inf is None else found_inf.to(p.device) > 0

        state = self.state[p]
        step = state["step"]
        assign(step, step + 1, skip)

        tensors = {name: tensor for name, tensor in state.items() if name != "step"}
        tensors["weights"] = p
        tensors["gradient"] = p.grad
        shards = {name: _as_rows(local_shard(tensor)) for name, tensor in tensors.items()}

        weights = shards["weights"]
        row_numel = weights[:1].numel() or 1
        rows_per_chunk = max(1, _chunk_numel(p.device) // row_numel)
        for start in range(0, len(weights), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            chunk = {name: shard[rows] for name, shard in shards.items()}
            _update_rows(chunk, group, step, grad_scale, skip)


class EightBitAdamW(CompactAdamW):
    """:class:`CompactAdamW` with the moments of large tensors in 8 bits."""

    eight_bit = True
    skips_on_device = True


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a view of a scalar as a vector."""
    return tensor if tensor.dim() else tensor.view(1)


def _chunk_numel(device: torch.device) -> int:
    return CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cpu"])


def _initial_state(p: torch.nn.Parameter, eight_bit: bool) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step. It is sharded like the parameter.

    ``step`` is on the parameter's device, so that ``found_inf`` can hold it back.
    """
    state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
    if needs_compensation(p):
        state["compensation"] = torch.zeros_like(p)

    has_codes = eight_bit and is_eight_bit(p.shape)
    for name in ("exp_avg", "exp_avg_sq"):
        dtype = torch.uint8 if has_codes else torch.float32
        state[name] = torch.zeros_like(p, dtype=dtype)
        if has_codes:
            # With the scale 0, every code is 0.
            state[f"{name}_scales"] = zeros_by_row(p, columns=blocks_per_row(p.shape))
    return state


def _update_rows(
    chunk: dict[str, torch.Tensor],
    group: dict[str, Any],
    step: torch.Tensor,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Update some rows of a parameter.

    Args:
        chunk: the rows of its weights, its gradient and its state.
        group: the settings.
        step: the number of this step.
        grad_scale: the gradient was multiplied by this.
        skip: a boolean scalar. If it is true, nothing is changed.
    """
    beta1, beta2 = group["betas"]
    gradient = chunk["gradient"].to(torch.float32)
    if grad_scale is not None:
        gradient = gradient / grad_scale

    first, second = _moments(chunk)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    _store_moments(chunk, first, second, skip)

    # Scalars on the device, so that the host does not wait for the number of steps.
    first_correction = 1 - beta1**step
    second_correction = 1 - beta2**step
    denominator = second.div_(second_correction).sqrt_().add_(group["eps"])
    update = first.div_(denominator).mul_(-group["lr"] / first_correction)
    update_weights(
        chunk["weights"],
        update,
        decay=1 - group["lr"] * group["weight_decay"],
        compensation=chunk.get("compensation"),
        skip=skip,
    )


def _moments(chunk: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of the moments, in float32."""
    if "exp_avg_scales" not in chunk:
        return chunk["exp_avg"].clone(), chunk["exp_avg_sq"].clone()
    device = chunk["weights"].device
    return (
        signed_codebook(device).decode(chunk["exp_avg"], chunk["exp_avg_scales"]),
        positive_codebook(device).decode(chunk["exp_avg_sq"], chunk["exp_avg_sq_scales"]),
    )


def _store_moments(
    chunk: dict[str, torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
    skip: torch.Tensor | None,
) -> None:
    """Keep the new moments, in the form in which they are kept."""
    if "exp_avg_scales" not in chunk:
        assign(chunk["exp_avg"], first, skip)
        assign(chunk["exp_avg_sq"], second, skip)
        return

    device = chunk["weights"].device
    for name, moment, codebook in (
        ("exp_avg", first, signed_codebook(device)),
        ("exp_avg_sq", second, positive_codebook(device)),
    ):
        codes, scales = codebook.encode(moment)
        assign(chunk[name], codes, skip)
        assign(chunk[f"{name}_scales"], scales, skip)
