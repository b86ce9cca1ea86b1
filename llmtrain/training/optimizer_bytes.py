"""Bytes of an optimizer: its state, and what a step allocates.

FSDP2 shards the first dimension of a parameter. So the state is counted by rows ``parameter[i]``.
"""

import math
from typing import NamedTuple

import torch

from llmtrain.training.adamw import CHUNK_NUMEL
from llmtrain.training.low_precision import BLOCK_SIZE, blocks_per_row, is_eight_bit

_FLOAT32_BYTES = 4
_BF16_BYTES = 2

# bitsandbytes keeps the moments of smaller tensors in float32.
_BITSANDBYTES_MIN_NUMEL = 4096
# Of temporary memory for each element that the AdamW of this package computes at a time.
_CHUNK_BYTES = 24

# It cannot train shards, nor weights in bfloat16.
BITSANDBYTES_OPTIMIZER = "paged_adamw_8bit"


class StateBytes(NamedTuple):
    """Bytes of a parameter's optimizer state.

    Attributes:
        per_row: of each row ``parameter[i]``, of which a shard has some.
        fixed: of what every shard has, such as the number of steps.
    """

    per_row: int = 0
    fixed: int = 0

    def of_rows(self, rows: int) -> int:
        """Return the bytes of a shard with some rows."""
        return rows * self.per_row + self.fixed


def state_bytes(optim: str, shape: torch.Size, is_bf16: bool) -> StateBytes:
    """Return the bytes of the state that an optimizer keeps for a trained parameter.

    Args:
        optim: as in ``--optim``. The matrices that ``muon`` trains have the state of ``muon``, and
            other parameters that of ``adamw``.
        shape: of the full parameter.
        is_bf16: whether the weights are in bfloat16.
    """
    rows, *row_shape = shape or [1]
    row_numel = math.prod(row_shape)
    compensation = row_numel * compensation_bytes(optim, is_bf16)

    if optim == "muon":
        return StateBytes(per_row=row_numel * _FLOAT32_BYTES + compensation)
    if optim == BITSANDBYTES_OPTIMIZER:
        return _bitsandbytes_bytes(rows * row_numel)

    step = _FLOAT32_BYTES
    moments = 2 * row_numel * _FLOAT32_BYTES
    if optim == "adamw_torch_8bit" and is_eight_bit(shape):
        moments = 2 * (row_numel + blocks_per_row(shape) * _FLOAT32_BYTES)
    return StateBytes(per_row=moments + compensation, fixed=step)


def compensation_bytes(optim: str, is_bf16: bool) -> int:
    """Return the bytes per element that keep what rounding to bfloat16 takes from the weights."""
    if not is_bf16 or optim == BITSANDBYTES_OPTIMIZER:
        return 0
    return _BF16_BYTES


def _bitsandbytes_bytes(numel: int) -> StateBytes:
    """Return the bytes of AdamW in bitsandbytes, which divides the flattened tensor into blocks."""
    if numel < _BITSANDBYTES_MIN_NUMEL:
        return StateBytes(fixed=2 * numel * _FLOAT32_BYTES)
    scales = -(-numel // BLOCK_SIZE) * _FLOAT32_BYTES
    return StateBytes(fixed=2 * (numel + scales))


def step_bytes(optim: str, largest_numel: int, is_bf16: bool, on_gpu: bool) -> int:
    """Return the bytes that a step allocates, without those of Muon's matrix products.

    Args:
        optim: as in ``--optim``.
        largest_numel: elements of the largest trained parameter, or of this process's shard of it.
        is_bf16: whether the weights are in bfloat16.
        on_gpu: whether the step runs on a GPU.
    """
    is_chunked = optim == "adamw_torch_8bit" or (is_bf16 and optim != BITSANDBYTES_OPTIMIZER)
    if not is_chunked:
        return 0  # a fused kernel
    chunk = CHUNK_NUMEL["cuda" if on_gpu else "cpu"]
    return _CHUNK_BYTES * min(largest_numel, chunk)
