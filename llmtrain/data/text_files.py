"""Files of data: their bytes, lines and digests.

A file is decompressed while it is read. An error names the file and, if there is one, the line.
"""

import codecs
import contextlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, AnyStr, BinaryIO, NamedTuple

from llmtrain.errors import UserError, first_line
from llmtrain.file_digests import file_digest

# The most bytes in a line of JSON Lines, and characters in a line or a field of CSV. A file without
# line breaks is then an error, before it fills the memory.
MAX_LINE_LENGTH = 1 << 28

# The formats of compressed files, as pyarrow names them.
CODECS = {".gz": "gzip", ".zst": "zstd"}


class Suffix(NamedTuple):
    """The end of a file's name, in lower case.

    Attributes:
        kind: the kind of file, such as ``.jsonl``.
        compression: a key of ``CODECS``; empty if the file is not compressed.
    """

    kind: str
    compression: str


def split_suffix(path: Path) -> Suffix:
    """Return the end of a file's name, with that of a compressed file in two parts."""
    suffix = path.suffix.lower()
    if suffix not in CODECS:
        return Suffix(suffix, "")
    return Suffix(Path(path.stem).suffix.lower(), suffix)


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, and decompress it if its name says that it is compressed."""
    compression = split_suffix(path).compression
    if not compression:
        with path.open("rb") as file:
            yield file
        return

    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty, and no {compression} file; copy or download it again.")
    import pyarrow

    try:
        with (
            pyarrow.input_stream(path, compression=CODECS[compression]) as stream,
            io.BufferedReader(stream) as file,
        ):
            yield file
    except OSError as error:
        if error.errno is not None:
            raise  # of the file system, not of the compressed data
        raise UserError(
            f"{path} cannot be decompressed ({first_line(error)}); copy or download it again."
        ) from None


def decode(raw: bytes, path: Path, line: int = 1) -> str:
    """Decode UTF-8.

    Args:
        raw: the content of a file, or one line of it.
        path: the file.
        line: the number of the first line in ``raw``, from 1.

    Raises:
        UserError: with the number of the line that is not UTF-8.
    """
    if line == 1:
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(
                f"{path} is UTF-16, not UTF-8; convert it with iconv -f UTF-16 -t UTF-8."
            )
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        byte = raw[error.start]
        raise UserError(
            f"{path}, line {line}: byte {byte:#04x} is not UTF-8; convert the file first."
        ) from None


def lines_of(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yield the lines of a file, with their line breaks.

    Raises:
        UserError: with the number of a line that is longer than ``MAX_LINE_LENGTH``.
    """
    for number in itertools.count(start=1):
        line = file.readline(MAX_LINE_LENGTH + 1)
        if not line:
            return
        if len(line) > MAX_LINE_LENGTH:
            raise UserError(
                f"{path}, line {number}: the line is longer than {MAX_LINE_LENGTH:,} bytes; write "
                "each record on a line of its own, or split the record."
            )
        yield line


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, but no hidden ones, such as those of git."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            yield path


def digest_of(path: Path) -> bytes:
    """Return the sha256 of a file's content; see :func:`llmtrain.file_digests.file_digest`."""
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
