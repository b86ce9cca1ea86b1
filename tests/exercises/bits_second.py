from hashlib import shake_128

import torch


def dropout_masks(seed: int, step: int, slots: list[int], size: int) -> torch.Tensor:
    """Take the bits of a row from a hash of its name, without a random number generator."""
    masks = torch.empty(len(slots), size, dtype=torch.bool)
    for mask, slot in zip(masks, slots, strict=True):
        name = f"seed {seed}, step {step}, slot {slot}"
        octets = bytearray(shake_128(name.encode()).digest(size // 8 + 1))
        bits = torch.frombuffer(octets, dtype=torch.uint8)[:, None] >> torch.arange(8) & 1
        mask.copy_(bits.flatten()[:size])
    return masks
