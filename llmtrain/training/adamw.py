"""AdamW for little memory: moments in 8 bits, weights in bfloat16, or both."""

from collections.abc import Iterable
from typing import Any

import torch

from llmtrain.parallel.shards import local_shard, zeros_by_row
from llmtrain.training.device_skip import found_inf_of
from llmtrain.training.low_precision import (
    assign,
    blocks_per_row,
    is_eight_bit,
    needs_compensation,
    positive_codebook,
    signed_codebook,
    update_weights,
)

# The most numbers that a step computes at a time, by the type of the device.
CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
# Bytes of temporary memory for each of them.
CHUNK_BYTES = 24

_CODEBOOKS = {"exp_avg": signed_codebook, "exp_avg_sq": positive_codebook}


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose state is small.

    It computes in float32. Weights may be float32, or bfloat16 with a compensation. Moments may be
    kept in 8 bits. See :mod:`llmtrain.training.low_precision`. Vectors and small matrices have
    moments in float32. Which ones are small is decided by the full shape, so the state does not
    depend on how parameters are sharded.

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

    keeps_small_updates = True
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

    @classmethod
    def initial_state(cls, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step. It is sharded like the parameter.

        ``step`` is on the parameter's device, so that ``found_inf`` can hold it back.
        """
        state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        if needs_compensation(p):
            state["compensation"] = torch.zeros_like(p)

        has_codes = cls.eight_bit and is_eight_bit(p.shape)
        for name in _CODEBOOKS:
            state[name] = torch.zeros_like(p, dtype=torch.uint8 if has_codes else torch.float32)
            if has_codes:
                # With the scale 0, every code is 0.
                state[f"{name}_scales"] = zeros_by_row(p, columns=blocks_per_row(p.shape))
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p].update(self.initial_state(p))
                self._update(p, group)

    def _update(self, p: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Update one parameter, some of its rows at a time."""
        found_inf = found_inf_of(self)
        grad_scale = getattr(self, "grad_scale", None)  # of a gradient scaler
        skip = None if found_inf is None else found_inf.to(p.device) > 0

        tensors = {**self.state[p], "weights": p, "gradient": p.grad}
        step = tensors.pop("step")
        assign(step, step + 1, skip)

        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        if not p.dim():  # a scalar is computed as a vector
            shards = {name: shard.view(1) for name, shard in shards.items()}
        weights = shards["weights"]
        chunk_numel = CHUNK_NUMEL.get(p.device.type, CHUNK_NUMEL["cpu"])
        rows_per_chunk = max(1, chunk_numel // (weights[:1].numel() or 1))
        for start in range(0, len(weights), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            chunk = {name: shard[rows] for name, shard in shards.items()}
            _update_rows(chunk, group, step, grad_scale, skip)


class EightBitAdamW(CompactAdamW):
    """:class:`CompactAdamW` with the moments of large tensors in 8 bits."""

    eight_bit = True
    skips_on_device = True


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

    first = _read_moment(chunk, "exp_avg").lerp_(gradient, 1 - beta1)
    second = _read_moment(chunk, "exp_avg_sq").mul_(beta2)
    second.addcmul_(gradient, gradient, value=1 - beta2)
    _store_moment(chunk, "exp_avg", first, skip)
    _store_moment(chunk, "exp_avg_sq", second, skip)

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


def _read_moment(chunk: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a copy of a moment, in float32."""
    scales = chunk.get(f"{name}_scales")
    if scales is None:
        return chunk[name].clone()
    return _CODEBOOKS[name](scales.device).decode(chunk[name], scales)


def _store_moment(
    chunk: dict[str, torch.Tensor], name: str, moment: torch.Tensor, skip: torch.Tensor | None
) -> None:
    """Replace a moment, in the form in which it is kept."""
    scales = chunk.get(f"{name}_scales")
    if scales is None:
        assign(chunk[name], moment, skip)
        return
    codes, new_scales = _CODEBOOKS[name](scales.device).encode(moment)
    assign(chunk[name], codes, skip)
    assign(scales, new_scales, skip)
