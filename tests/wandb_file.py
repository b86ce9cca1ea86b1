"""Read a W&B offline file through W&B's own record schema.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md): after a header of 7 bytes,
blocks of 32 kB hold chunks of a checksum, a length and a type; a record may span several chunks.
"""

import json
import struct
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Record]:
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    records, parts, at = [], b"", 7
    while at + 7 <= len(raw):
        if _BLOCK - at % _BLOCK < 7:  # a block's last bytes, too few for a chunk's header
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        if kind == 0:
            break
        chunk = raw[at + 7 : at + 7 + length]
        at += 7 + length
        parts = chunk if kind in (_FULL, _FIRST) else parts + chunk
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            records.append(record)
    return records


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return what was logged, a dictionary a step."""
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in read_records(path)
        if record.WhichOneof("record_type") == "history"
    ]
