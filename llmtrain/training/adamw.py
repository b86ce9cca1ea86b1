"""AdamW for little memory: weights in bfloat16, moments in 8 bits, or both.

**Weights in bfloat16** have 8 significant bits. An update below a 500th of a weight would be lost
by rounding, and most updates are. So the optimizer keeps what rounding has cut off, the
*compensation*, in a second bfloat16 number, and adds it to the next update (Kahan 1965, DOI
10.1145/363707.363723; for training: Zamirai et al. 2020, arXiv:2010.06192). Together, a weight and
its compensation have about 16 significant bits.

**Tensors in 8 bits** have a code for each number, and a scale for each block of numbers. This is
block-wise dynamic quantization (Dettmers et al. 2022, arXiv:2110.02861). A scale is the largest
absolute value of its block. A code stands for a fraction of the scale, by a codebook of 256 values
that are denser near zero. A *row* of a tensor is ``tensor[i]``, flattened. Blocks never cross a
row, and FSDP2 cuts tensors between rows. So the codes and the scales are the same however a tensor
is sharded.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from llmtrain.parallel.shards import local_shard, zeros_by_row

# The most numbers that a step computes at a time, by the type of the device.
CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
# Bytes of temporary memory for each of them.
CHUNK_BYTES = 24

# Numbers of a block of 8-bit codes.
BLOCK_SIZE = 256

# Smaller tensors, or tensors with shorter rows, would save little.
_MIN_NUMEL = 4096
_MIN_ROW_NUMEL = 64

_CODES = 256
_BFLOAT16_VALUES = 1 << 16
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


# --- weights in bfloat16


def needs_compensation(parameter: torch.Tensor) -> bool:
    """Return whether the weights of a parameter are too coarse for small updates."""
    return parameter.dtype == torch.bfloat16


def update_weights(
    weights: torch.Tensor,
    update: torch.Tensor,
    *,
    decay: float | torch.Tensor,
    compensation: torch.Tensor | None,
    skip: torch.Tensor | None = None,
) -> None:
    """Multiply weights by a factor and add an update, in float32.

    Args:
        weights: the weights, which are changed.
        update: float32, of the same shape.
        decay: the factor.
        compensation: what rounding has cut off the weights, for weights in bfloat16. It is changed.
        skip: a boolean scalar. If it is true, nothing is changed.
    """
    total = weights.to(torch.float32, copy=True)
    if compensation is not None:
        total.add_(compensation)
    total.mul_(decay).add_(update)

    rounded = total.to(weights.dtype)
    if compensation is not None:
        assign(compensation, total.sub_(rounded), skip)
    assign(weights, rounded, skip)


def assign(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Copy a value into a tensor, unless the boolean scalar ``skip`` is true."""
    if skip is not None:
        value = torch.where(skip, target, value.to(target.dtype))
    target.copy_(value)


# --- tensors in 8 bits


def is_eight_bit(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this full shape is kept in 8 bits."""
    numel = math.prod(shape)
    return len(shape) >= 2 and numel >= _MIN_NUMEL and numel // shape[0] >= _MIN_ROW_NUMEL


def blocks_per_row(shape: Sequence[int]) -> int:
    """Return the number of blocks in a row of a tensor of this shape."""
    return -(-math.prod(shape[1:]) // BLOCK_SIZE)


class Codebook(NamedTuple):
    """The values of the codes, and the code of each fraction.

    Attributes:
        values: float32 [256], ascending.
        codes: uint8 [65,536]: the code of each value of bfloat16, by its bits read as an int16 and
            increased by 32,768. A search in ``values`` takes 15 times as long on a CPU.
    """

    values: torch.Tensor
    codes: torch.Tensor

    def encode(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers as codes and scales.

        Args:
            numbers: float32 [rows, ...].

        Returns:
            The codes, uint8 of the same shape, and the scales, float32 [rows, blocks].
        """
        blocks = _in_blocks(numbers)
        scales = blocks.abs().amax(-1)
        fractions = blocks / scales.clamp(min=_SMALLEST_SCALE).unsqueeze(-1)

        # Fractions are rounded to the nearest bfloat16, which is closer than neighbouring codes.
        bits = fractions.to(torch.bfloat16).view(torch.int16)
        indices = bits.to(torch.int32).add_(_BFLOAT16_VALUES // 2)
        codes = self.codes.index_select(0, indices.flatten()).view(blocks.shape)
        return _without_padding(codes, numbers.shape), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers of codes and scales, in float32."""
        blocks = _in_blocks(codes)
        values = self.values.index_select(0, blocks.flatten().to(torch.int32)).view(blocks.shape)
        return _without_padding(values.mul_(scales.unsqueeze(-1)), codes.shape)


@functools.cache
def signed_codebook(device: torch.device) -> Codebook:
    """Return the codebook for numbers of either sign. Zero has a code."""
    positive = _dynamic_values(bits=7)
    # 128 of the 256 values are positive, one is zero, and -1 is left out.
    values = torch.cat([-positive[:-1].flip(0), positive.new_zeros(1), positive])
    return _codebook(values, device)


@functools.cache
def positive_codebook(device: torch.device) -> Codebook:
    """Return the codebook for numbers that are not negative.

    Zero has no code. A second moment that was rounded to zero would make an update very large.
    """
    return _codebook(_dynamic_values(bits=8), device)


def _dynamic_values(bits: int) -> torch.Tensor:
    """Return the positive values of dynamic quantization with some bits, in float64.

    The number of zero bits in front of the first one is a decimal exponent. The bits behind it
    choose one of the intervals into which the range from 0.1 to 1 is divided evenly; the value is
    the middle of the interval, times the power of ten. The value 1 is added, so that the largest
    number of a block has a code of its own.
    """
    values = [torch.ones(1, dtype=torch.float64)]
    for zeros in range(bits):
        borders = torch.linspace(0.1, 1, 2 ** (bits - 1 - zeros) + 1, dtype=torch.float64)
        middles = (borders[1:] + borders[:-1]) / 2
        values.append(middles * 10.0**-zeros)
    return torch.cat(values).sort().values


def _codebook(values: torch.Tensor, device: torch.device) -> Codebook:
    """Return a codebook of 256 ascending values in float64."""
    assert len(values) == _CODES

    half = _BFLOAT16_VALUES // 2
    bits = torch.arange(-half, half, dtype=torch.int32).to(torch.int16)
    fractions = bits.view(torch.bfloat16).to(torch.float64).nan_to_num(0.0)
    borders = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(fractions, borders).to(torch.uint8)
    return Codebook(values.float().to(device), codes.to(device))


def _in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as [rows, blocks, numbers of a block], with zeros at the end of each row."""
    rows = tensor.reshape(len(tensor), -1)
    size = min(BLOCK_SIZE, rows.shape[1])
    padding = -rows.shape[1] % size
    if padding:
        rows = F.pad(rows, (0, padding))
    return rows.view(len(tensor), -1, size)


def _without_padding(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of a shape, given its blocks: the inverse of :func:`_in_blocks`."""
    return blocks.flatten(1)[:, : math.prod(shape[1:])].reshape(shape)


_CODEBOOKS = {"exp_avg": signed_codebook, "exp_avg_sq": positive_codebook}


# --- the optimizer


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose state is small.

    It computes in float32. Weights may be float32, or bfloat16 with a compensation. Moments may be
    kept in 8 bits. Vectors and small matrices have moments in float32. Which ones are small is
    decided by the full shape, so the state does not depend on how parameters are sharded.

    Like torch's fused AdamW, it can skip a step on the device; see
    :func:`llmtrain.training.step.can_skip_on_device`.

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
        # A step that may be skipped on the device, and a gradient scaler, set these attributes.
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
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
