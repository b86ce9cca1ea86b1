"""Tensors as safetensors files, hashed while they are written (https://huggingface.co/docs/safetensors).

The format: 8 bytes with the header's length, the header as JSON (name -> dtype, shape, offsets), the tensors' bytes.
"""

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, load_file

from llmtrain.files import write_hashed
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import meta_like
from llmtrain.parallel.team import ALONE, Team
from llmtrain.types import Facts, Published

# Tensors of their own, not pages of a file that may be deleted; and sooner ready, where safetensors can.
_READ = {"backend": "pread"} if "backend" in inspect.signature(load_file).parameters else {}

_STAGE_BYTES = 1 << 26  # of each of two buffers between a GPU and the disk

_DTYPES = {
    name: dtype for name, dtype in _TYPES.items() if dtype is not None
}  # torch need not have all of them
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Header = tuple[str, torch.Size, torch.dtype]


def as_it_is(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor under its name."""
    return {name: whole}


class Share(NamedTuple):
    """The tensors of a file that the writers of a team write, the largest first, dealt out in turn.

    They may be sharded, and lie on any device: each is gathered to the rank that writes it, as many at a time as there
    are writers. ``published`` makes of a full tensor those that are written.
    """

    source: DistributedTensors
    team: Team = ALONE
    divisible: bool = True  # into a file of each writer
    published: Published = as_it_is

    @property
    def writers(self) -> tuple[int, ...]:
        return self.team.writers if self.divisible else self.team.writers[:1]

    @property
    def bytes(self) -> int:
        """The size of the full tensors."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in self.source.tensors.values()
        )

    @property
    def dealt(self) -> list[list[str]]:
        """The names of the tensors of each writer; wider elements first, so that each tensor is aligned."""
        sizes = {
            name: (-tensor.element_size(), -tensor.numel(), name)
            for name, tensor in self.source.tensors.items()
        }
        names = sorted(sizes, key=sizes.__getitem__)
        return [names[place :: len(self.writers)] for place in range(len(self.writers))]

    def headers(self, names: list[str]) -> list[Header]:
        """Return the headers of what is written for these tensors."""
        written = (self.published(name, meta_like(self.source.tensors[name])) for name in names)
        return [
            (name, tensor.shape, tensor.dtype) for one in written for name, tensor in one.items()
        ]

    def files(self, name: str) -> list[str]:
        """Return the file of each writer; ``name`` itself where there is one."""
        stem, _, ending = name.rpartition(".")
        count = len(self.writers)
        return (
            [name]
            if count == 1
            else [f"{stem}-{i + 1:05d}-of-{count:05d}.{ending}" for i in range(count)]
        )

    def wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather and yield the full tensors that this rank writes, one after the other. All ranks call this."""
        for names in itertools.zip_longest(*self.dealt):
            dealt = [
                (name, to) for name, to in zip(names, self.writers, strict=True) if name is not None
            ]
            gathered = [(name, self.source.gather_to(name, to)) for name, to in dealt]
            yield from ((name, whole) for name, whole in gathered if whole is not None)


def write_tensors(folder: Path, name: str, share: Share) -> Facts:
    """Write this rank's file of a share, and return its name with its ``bytes`` and ``sha256``.

    ``safetensors.torch.load_file`` reads it. One full tensor at a time is held on the host. All ranks call this.
    """
    blocks = _blocks(share)
    try:
        file = dict(zip(share.writers, share.files(name), strict=True)).get(share.team.rank)
        return {} if file is None else {file: write_hashed(folder / file, blocks)}
    finally:
        for _ in blocks:  # after an error too: the others wait for what this rank holds of theirs
            pass


def _blocks(share: Share) -> Iterator[bytes | memoryview]:
    mine = dict(zip(share.writers, share.dealt, strict=True)).get(share.team.rank, [])
    header: Facts = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in share.headers(mine):
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    written = (
        tensor for name, whole in share.wholes() for tensor in share.published(name, whole).values()
    )
    flat = (tensor.detach().contiguous().flatten() for tensor in written if tensor.numel())
    yield from _bytes_of(tensor.view(torch.uint8) for tensor in flat)


def _bytes_of(
    tensors: Iterator[torch.Tensor],
    staged: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
) -> Iterator[memoryview]:
    """Yield the bytes of tensors [N] of bytes; those that are ``staged`` go through pinned memory.

    What is next is on its way into one of two buffers while the other is hashed and written.
    """
    buffers: list[torch.Tensor] = []
    coming: tuple[torch.Tensor, torch.Event | None] | None = None

    def arrived() -> Iterator[memoryview]:
        if coming is not None:
            buffer, copied = coming
            if copied is not None:
                copied.synchronize()
            yield buffer.numpy().data

    for tensor in tensors:
        if not staged(tensor):
            yield from arrived()
            coming = None
            yield tensor.cpu().numpy().data
            continue
        buffers = buffers or [
            torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            for _ in range(2)
        ]
        for piece in torch.split(tensor, _STAGE_BYTES):
            buffer = buffers[0][: len(piece)].copy_(piece, non_blocking=True)
            event = torch.cuda.current_stream().record_event() if piece.is_cuda else None
            yield from arrived()
            coming, buffers = (buffer, event), buffers[::-1]
    yield from arrived()


def headers(folder: Path) -> list[Header]:
    """Return name, shape and dtype of every tensor in the safetensors files of a folder."""
    found = ((name, file.get_slice(name)) for file, name in _stored(folder))
    return [
        (name, torch.Size(stored.get_shape()), _DTYPES[stored.get_dtype()])
        for name, stored in found
    ]


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all safetensors files of a folder, in the order of :func:`headers`, one at a time."""
    return ((name, file.get_tensor(name)) for file, name in _stored(folder))


def _stored(folder: Path) -> Iterator[tuple[Any, str]]:  # of safetensors, which says no types
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", **_READ) as file:
            yield from ((file, name) for name in file.keys())  # noqa: SIM118 - it is no dict
