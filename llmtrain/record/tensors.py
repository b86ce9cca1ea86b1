"""Tensors as safetensors files, hashed while they are written (https://huggingface.co/docs/safetensors).

The format: 8 bytes with the header's length, the header as JSON (name -> dtype, shape, offsets), the tensors' bytes.
"""

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from llmtrain.contract import Published
from llmtrain.files import write_hashed
from llmtrain.parallel.mesh import Home, Spread, meta_like

# Tensors of their own, not pages of a file that may be deleted; and sooner ready, where safetensors can.
_READ: Any = {"backend": "pread"} if "backend" in inspect.signature(load_file).parameters else {}

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


Header = tuple[str, torch.Size, torch.dtype]


def as_it_is(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: whole}


@dataclass(frozen=True)
class Share:
    """The tensors of a file that several processes write, each its part: the largest first, dealt out in turn.

    ``tensors`` are all of them, by name, and may be spread over the processes: each is gathered to the one that writes
    it, as many at a time as there are writers. They may lie on any device. ``published`` makes of a whole tensor those
    that are written.
    """

    tensors: dict[str, torch.Tensor]
    rank: int = 0
    writers: tuple[int, ...] = (0,)
    published: Published = as_it_is
    homes: Mapping[str, Home] = field(default_factory=dict)  # of those that other ranks hold

    @property
    def dealt(self) -> list[list[str]]:
        """The names that each writer writes; wider elements first, so that each tensor is aligned."""

        def order(name: str) -> tuple[int, int, str]:
            return -self.tensors[name].element_size(), -self.tensors[name].numel(), name

        names = sorted(self.tensors, key=order)
        return [names[place :: len(self.writers)] for place in range(len(self.writers))]

    @property
    def mine(self) -> list[str]:
        return self.dealt[self.writers.index(self.rank)] if self.rank in self.writers else []

    def headers(self, names: list[str]) -> list[Header]:
        """Of what is written for these tensors."""
        written = (item for name in names for item in self.published(name, meta_like(self.tensors[name])).items())
        return [(name, tensor.shape, tensor.dtype) for name, tensor in written]

    def files(self, name: str) -> list[str]:
        """Of all writers, of which this is the one file where there is one."""
        stem, _, ending = name.rpartition(".")
        count = len(self.writers)
        return [name] if count == 1 else [f"{stem}-{i + 1:05d}-of-{count:05d}.{ending}" for i in range(count)]

    def wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this process writes, one whole tensor after the other. All processes go through this together."""
        spread = Spread(self.tensors, self.homes)
        for names in itertools.zip_longest(*self.dealt):
            kept = None
            for name, writer in zip(names, self.writers, strict=True):
                whole = spread.gather_to(name, writer) if name is not None else None
                kept = kept if whole is None else (name, whole)
            if kept is not None:
                yield kept


def write_tensors(folder: Path, name: str, share: Share) -> dict[str, Any]:
    """Write this process's file of a share, which ``safetensors.torch.load_file`` reads; returns its name with its
    ``bytes`` and ``sha256``. One whole tensor at a time is held on the host."""
    pieces = _pieces(share)
    try:
        if share.rank not in share.writers:
            return {}
        file = share.files(name)[share.writers.index(share.rank)]
        return {file: write_hashed(folder / file, pieces)}
    finally:
        for _ in pieces:  # after an error too: the others wait for what this process holds of theirs
            pass


def _pieces(share: Share) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in share.headers(share.mine):
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, whole in share.wholes():
        for tensor in share.published(name, whole.cpu()).values():
            flat = tensor.contiguous().flatten()
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data


def headers(folder: Path) -> list[Header]:
    """Name, shape and dtype of every tensor in the safetensors files of a folder."""
    found = []
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", **_READ) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                about = file.get_slice(name)
                found.append((name, torch.Size(about.get_shape()), dtypes[about.get_dtype()]))
    return found


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all safetensors files of a folder, in the order of :func:`headers`, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", **_READ) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
