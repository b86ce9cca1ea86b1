"""Tensors as safetensors files, hashed while they are written (https://huggingface.co/docs/safetensors).

The format: 8 bytes with the header's length, the header as JSON (name -> dtype, shape, offsets), the tensors' bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llmtrain.files import write_hashed

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a new file that ``safetensors.torch.load_file`` reads; returns its ``bytes`` and ``sha256``.

    Tensors may lie on any device; one at a time is copied to the host.
    """
    return write_hashed(path, _pieces(tensors))


def _pieces(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().flatten()
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
