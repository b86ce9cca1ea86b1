"""Tensors in safetensors files, hashed while they are written.

A safetensors file (https://huggingface.co/docs/safetensors) has three parts: 8 bytes with the
length of the header, the header as JSON (for each name the dtype, shape and offsets), and the bytes
of the tensors.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from safetensors import safe_open

from llmtrain.files import Hashed, JsonObject, errors_name, json_text, write_hashed
from llmtrain.interfaces.model import TensorConverter
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import gather_to, meta_like

_STAGE_BYTES = 1 << 26  # the size of the buffer between a GPU and the disk

# The dtypes of torch, by their names in the files.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
STORABLE_DTYPES = frozenset(_DTYPE_NAMES)


def unchanged(name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor under its own name."""
    return {name: full}


@dataclass(frozen=True)
class FilePlan:
    """A plan of safetensors files: which rank writes which tensors into which file.

    The tensors may be sharded, on any device. Each of them is gathered on the rank that writes it,
    at most one on each rank at a time.

    Attributes:
        path: the path of the file, relative to the folder that is written. If several ranks write,
            their files have this name with a number.
        tensors: the tensors by name.
        ranks: the ranks that write, each a file.
        convert: takes the name of a tensor and the full tensor, and returns the tensors that are
            written for it.
    """

    path: str
    tensors: dict[str, torch.Tensor]
    ranks: tuple[int, ...] = (0,)
    convert: TensorConverter = unchanged

    @functools.cached_property
    def written(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that are written for each of the tensors, without their values."""
        return {name: self.convert(name, meta_like(full)) for name, full in self.tensors.items()}

    @property
    def byte_count(self) -> int:
        """The size of all tensors that are written, in bytes."""
        return sum(
            tensor.nbytes for tensors in self.written.values() for tensor in tensors.values()
        )

    @property
    def paths(self) -> dict[int, str]:
        """The file that each rank writes: :attr:`path` itself if only one rank writes."""
        count = len(self.ranks)
        if count == 1:
            return {self.ranks[0]: self.path}
        stem, _, ending = self.path.rpartition(".")
        return {
            rank: f"{stem}-{number:05d}-of-{count:05d}.{ending}"
            for number, rank in enumerate(self.ranks, start=1)
        }

    @property
    def names(self) -> dict[int, list[str]]:
        """The names of the tensors that each rank writes, in their order in the file.

        The tensors are dealt to the ranks in turn: those with wider elements first, so that each
        tensor is aligned in its file, and larger ones before smaller ones.
        """
        sort_keys = {}
        for name, tensor in self.tensors.items():
            widths = [written.element_size() for written in self.written[name].values()]
            sort_keys[name] = (-max(widths), -tensor.numel(), name)
        names = sorted(sort_keys, key=sort_keys.__getitem__)
        count = len(self.ranks)
        return {rank: names[index::count] for index, rank in enumerate(self.ranks)}

    def tensors_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors in the file of a rank by name, without their values."""
        tensors = {}
        for name in self.names[rank]:
            tensors.update(self.written[name])
        return tensors

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the full tensors that this rank writes, and yield them one at a time.

        All ranks that hold a part of the tensors call this and exhaust it.
        """
        names_by_rank = self.names
        for names in itertools.zip_longest(*names_by_rank.values()):
            gathered = []
            for name, rank in zip(names, names_by_rank, strict=True):
                if name is not None:  # else this rank writes one tensor less
                    gathered.append((name, gather_to(self.tensors[name].detach(), rank)))
            for name, full in gathered:
                if full is not None:
                    yield name, full


def write_tensors(folder: Path, plan: FilePlan, rank: int) -> dict[str, Hashed]:
    """Write the file of this rank, if it has one. All ranks that hold tensors call this.

    The bytes are hashed on their way to the file, and are on the disk when this returns. The host
    holds one full tensor at a time. ``safetensors.torch.load_file`` reads the file.

    Args:
        folder: the folder that is written.
        plan: the tensors and their files.
        rank: this rank.

    Returns:
        The file's size and hash by its path; empty if this rank writes none.
    """
    chunks = _file_chunks(plan, rank)
    try:
        if rank not in plan.ranks:
            return {}
        path = plan.paths[rank]
        return {path: write_hashed(folder / path, chunks)}
    finally:
        # Take part in gathering all tensors, even after an error: the other ranks wait for the
        # shards that this rank holds.
        for _ in chunks:
            pass


def _file_chunks(plan: FilePlan, rank: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file that this rank writes: the header, then the tensors.

    The bytes of a GPU's tensors pass through a buffer in pinned memory, which is fast to copy to.
    The next chunk may overwrite them.
    """
    if rank in plan.ranks:
        content: JsonObject = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in plan.tensors_of(rank).items():
            end = offset + tensor.nbytes
            content[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        header = json_text(content, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
        yield len(header).to_bytes(8, "little") + header

    buffer = None
    for name, full in plan.full_tensors():
        for tensor in plan.convert(name, full).values():
            if not tensor.numel():
                continue
            data = tensor.detach().contiguous().flatten().view(torch.uint8)
            if not data.is_cuda:
                yield data.cpu().numpy().data
                continue
            if buffer is None:
                buffer = torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            for piece in torch.split(data, _STAGE_BYTES):
                yield buffer[: len(piece)].copy_(piece).numpy().data


def read_headers(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the safetensors files of a folder by name, without their values."""
    headers = {}
    for file, name in _stored_tensors(folder):
        stored = file.get_slice(name)
        dtype = _DTYPES[stored.get_dtype()]
        headers[name] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    return headers


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the safetensors files of a folder, one at a time.

    They come in the order of :func:`read_headers`.
    """
    for file, name in _stored_tensors(folder):
        with errors_name(folder):
            tensor = file.get_tensor(name)
        yield name, tensor


def read_tensors_on_main(folder: Path, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder that rank 0 sees, by name and one at a time, on every rank.

    Args:
        folder: the folder. Other ranks need not see it.
        ranks: the ranks, over whose devices rank 0 sends the tensors.
    """
    if ranks.group is None:
        yield from read_tensors(folder)
        return

    tensors = read_tensors(folder) if ranks.is_main else None
    for name, header in ranks.on_main(lambda: read_headers(folder)).items():
        if tensors is not None:
            _, tensor = next(tensors)
        else:
            tensor = torch.empty_like(header, device="cpu")
        # Bytes, because not every backend sends every dtype.
        data = tensor.to(ranks.device).flatten().view(torch.uint8)
        yield name, broadcast(data).view(header.dtype).view(header.shape)


def _stored_tensors(folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield an open file and a name for each tensor. The files of safetensors have no types."""
    for path in sorted(folder.glob("*.safetensors")):
        with errors_name(path):
            # With "pread", tensors have their own memory instead of pages of a file that may be
            # deleted, and are read faster.
            opened = safe_open(path, "pt", backend="pread")
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield file, name
