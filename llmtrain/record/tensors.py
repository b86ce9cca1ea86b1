"""Tensors in safetensors files, hashed while they are written.

A safetensors file (https://huggingface.co/docs/safetensors) has three parts: 8 bytes with the
length of the header, the header as JSON (for each name the dtype, shape and offsets), and the bytes
of the tensors.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, load_file

from llmtrain.files import json_text, write_hashed
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import meta_like
from llmtrain.parallel.team import THIS_RANK, Team
from llmtrain.types import JsonObject, TensorConverter

# With "pread", tensors have their own memory instead of pages of a file that may be deleted, and
# are read faster. Older versions of safetensors do not have it.
_READ_OPTIONS = {"backend": "pread"} if "backend" in inspect.signature(load_file).parameters else {}

_STAGE_BYTES = 1 << 26  # the size of each of the two buffers between a GPU and the disk

# An installed torch need not have all dtypes that safetensors knows.
_DTYPES = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Header(NamedTuple):
    """The description of a tensor in a file."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def unchanged(name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor under its own name."""
    return {name: full}


class Share(NamedTuple):
    """The tensors of one safetensors file, or of one file for each rank that writes.

    The tensors may be sharded, on any device. Each of them is gathered on the rank that writes it,
    at most one on each writer at a time.

    Attributes:
        source: the tensors.
        team: the ranks that write together.
        divisible: whether each writer writes its own file. Otherwise the first one writes all.
        convert: takes the name of a tensor and the full tensor, and returns the tensors that are
            written for it.
    """

    source: DistributedTensors
    team: Team = THIS_RANK
    divisible: bool = True
    convert: TensorConverter = unchanged

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write a file."""
        return self.team.writers if self.divisible else self.team.writers[:1]

    @property
    def byte_count(self) -> int:
        """The size of all full tensors, in bytes."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in self.source.tensors.values()
        )

    @property
    def names_by_writer(self) -> list[list[str]]:
        """The names of the tensors of each writer, in the order of :attr:`writers`.

        The tensors are dealt to the writers in turn: those with wider elements first, so that each
        tensor is aligned in its file, and larger ones before smaller ones.
        """
        sort_keys = {
            name: (-tensor.element_size(), -tensor.numel(), name)
            for name, tensor in self.source.tensors.items()
        }
        names = sorted(sort_keys, key=sort_keys.__getitem__)
        count = len(self.writers)
        return [names[index::count] for index in range(count)]

    @property
    def own_names(self) -> list[str]:
        """The names of the tensors that this rank writes."""
        if self.team.rank not in self.writers:
            return []
        return self.names_by_writer[self.writers.index(self.team.rank)]

    def headers(self, names: list[str]) -> list[Header]:
        """Return the headers of the tensors that are written for the tensors of these names."""
        headers = []
        for name in names:
            converted = self.convert(name, meta_like(self.source.tensors[name]))
            for written_name, tensor in converted.items():
                headers.append(Header(written_name, tensor.shape, tensor.dtype))
        return headers

    def file_names(self, name: str) -> list[str]:
        """Return the name of each writer's file: ``name`` itself if there is one writer."""
        count = len(self.writers)
        if count == 1:
            return [name]
        stem, _, ending = name.rpartition(".")
        return [f"{stem}-{i + 1:05d}-of-{count:05d}.{ending}" for i in range(count)]

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the full tensors that this rank writes, and yield them one at a time.

        All ranks of the team call this and exhaust it.
        """
        for names in itertools.zip_longest(*self.names_by_writer):
            gathered = []
            for name, writer in zip(names, self.writers, strict=True):
                if name is not None:  # else this writer has one tensor less
                    gathered.append((name, self.source.gather_to(name, writer)))
            for name, full in gathered:
                if full is not None:
                    yield name, full


def write_tensors(folder: Path, name: str, share: Share) -> JsonObject:
    """Write this rank's file of a share. All ranks of the share's team call this.

    The host holds one full tensor at a time. ``safetensors.torch.load_file`` reads the file.

    Args:
        folder: where to write.
        name: the name of the file, or the name that :meth:`Share.file_names` numbers.
        share: the tensors.

    Returns:
        The file's ``bytes`` and ``sha256`` by its name; empty if this rank writes none.
    """
    blocks = _file_blocks(share)
    try:
        if share.team.rank not in share.writers:
            return {}
        file_name = share.file_names(name)[share.writers.index(share.team.rank)]
        return {file_name: write_hashed(folder / file_name, blocks)}
    finally:
        # Take part in gathering all tensors, even after an error: the other ranks wait for the
        # shards that this rank holds.
        for _ in blocks:
            pass


def _file_blocks(share: Share) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file that this rank writes: the header, then the tensors."""
    yield _encoded_header(share)
    yield from _bytes_of(_byte_tensors(share))


def _encoded_header(share: Share) -> bytes:
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in share.headers(share.own_names):
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end

    text = json_text(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _byte_tensors(share: Share) -> Iterator[torch.Tensor]:
    """Yield the tensors that this rank writes, as bytes: uint8 [N]."""
    for name, full in share.full_tensors():
        for tensor in share.convert(name, full).values():
            if tensor.numel():
                yield tensor.detach().contiguous().flatten().view(torch.uint8)


class _Copy(NamedTuple):
    """A copy into a buffer on the host, which may be under way."""

    buffer: torch.Tensor
    done: torch.Event | None  # None: the copy is complete

    def data(self) -> memoryview:
        """Wait for the copy, and return its bytes."""
        if self.done is not None:
            self.done.synchronize()
        data: memoryview = self.buffer.numpy().data
        return data


def _bytes_of(
    tensors: Iterator[torch.Tensor],
    is_staged: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
) -> Iterator[memoryview]:
    """Yield the bytes of uint8 tensors [N].

    Staged tensors are copied through two buffers in pinned memory: while the caller hashes and
    writes one of them, the other one is filled.

    Args:
        tensors: the tensors.
        is_staged: returns whether a tensor is staged. By default, those on a GPU are.
    """
    buffers: list[torch.Tensor] = []
    pending: _Copy | None = None  # the newest copy, whose bytes were not yielded yet

    for tensor in tensors:
        if not is_staged(tensor):
            if pending is not None:
                yield pending.data()
                pending = None
            yield tensor.cpu().numpy().data
            continue

        if not buffers:
            buffers = [
                torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
                for _ in range(2)
            ]
        for piece in torch.split(tensor, _STAGE_BYTES):
            buffer = buffers[0][: len(piece)].copy_(piece, non_blocking=True)
            event = torch.cuda.current_stream().record_event() if piece.is_cuda else None
            if pending is not None:
                yield pending.data()
            pending = _Copy(buffer, event)
            buffers.reverse()

    if pending is not None:
        yield pending.data()


def read_headers(folder: Path) -> list[Header]:
    """Return the headers of all tensors in the safetensors files of a folder."""
    headers = []
    for file, name in _stored_tensors(folder):
        stored = file.get_slice(name)
        shape = torch.Size(stored.get_shape())
        headers.append(Header(name, shape, _DTYPES[stored.get_dtype()]))
    return headers


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the safetensors files of a folder, one at a time.

    They come in the order of :func:`read_headers`.
    """
    for file, name in _stored_tensors(folder):
        yield name, file.get_tensor(name)


def _stored_tensors(folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield an open file and a name for each tensor. The files of safetensors have no types."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", **_READ_OPTIONS) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield file, name
