"""Read a W&B offline file with W&B's own record schema.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md): after a
header of 7 bytes, it consists of blocks of 32 kB with chunks. A chunk has a checksum, a length, a
type and data. The data of a record may be in several chunks.
"""

import json
import struct
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_CHUNK_HEADER = struct.Struct("<IHB")

# Types of chunks. The remaining one, 3, is a middle part of a record.
_FULL = 1
_FIRST = 2
_LAST = 4


def read_records(path: Path) -> list[Record]:
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    records = []
    data = b""
    position = _FILE_HEADER_BYTES
    while position + _CHUNK_HEADER.size <= len(content):
        rest_of_block = _BLOCK_BYTES - position % _BLOCK_BYTES
        if rest_of_block < _CHUNK_HEADER.size:
            position += rest_of_block
            continue

        _, length, kind = _CHUNK_HEADER.unpack_from(content, position)
        if kind == 0:  # padding at the end of the file
            break
        position += _CHUNK_HEADER.size
        chunk = content[position : position + length]
        position += length

        if kind in (_FULL, _FIRST):
            data = b""
        data += chunk
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(data)
            records.append(record)
    return records


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the logged values, a dictionary for each log entry."""
    history = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            entry = {_key_of(item): json.loads(item.value_json) for item in items}
            history.append(entry)
    return history


def _key_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
