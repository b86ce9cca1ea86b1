"""The cache: where it is, and the digest of a file, remembered, but never that of other content."""

import hashlib
import os
import time
from pathlib import Path
from typing import IO, Any

import pytest

from llmtrain import file_digests
from llmtrain.file_digests import file_digest
from llmtrain.files import cache_folder


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is worth remembering, and a clock that says that it was written long ago."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "_MIN_KEPT_SIZE", 3)
    path = tmp_path / "text"
    path.write_text("one")
    later = time.time() + 600
    monkeypatch.setattr(file_digests.time, "time", lambda: later)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    read: list[str] = []
    original = hashlib.file_digest

    def digest(file: IO[bytes], name: str) -> Any:
        read.append(file.name)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return read


def write_later(path: Path, text: str) -> None:
    """Once the file system's clock, which may go in steps of some milliseconds, has gone on."""
    written, scratch = path.stat().st_ctime_ns, path.with_suffix(".scratch")
    while not scratch.exists() or scratch.stat().st_ctime_ns <= written:
        scratch.write_text("")
    path.write_text(text)


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def test_a_large_file_is_read_once_unless_the_caller_wants_it(
    large: Path, reads: list[str]
) -> None:
    assert file_digest(large) == file_digest(large) == sha256("one")
    assert reads == [str(large)]
    assert file_digest(large, reread=True) == sha256("one")
    assert len(reads) == 2


def test_a_changed_file_is_read_again_though_size_and_time_are_set_back(
    large: Path, reads: list[str]
) -> None:
    before = large.stat()
    file_digest(large)
    write_later(large, "two")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(large) == sha256("two")
    assert len(reads) == 2


def test_a_file_written_just_now_is_not_remembered(
    large: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests.time, "time", lambda: large.stat().st_ctime_ns / 1e9 + 59)
    assert file_digest(large) == file_digest(large) == sha256("one")
    assert len(reads) == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hashlib.file_digest

    def digest(file: IO[bytes], name: str) -> Any:
        found = original(file, name)
        write_later(large, "two")
        return found

    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert file_digest(large) == sha256("one")
    assert not (cache_folder() / "digests").exists()


def test_a_damaged_memory_is_no_memory(large: Path) -> None:
    file_digest(large)
    [remembered] = (cache_folder() / "digests").iterdir()
    content = remembered.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        remembered.write_bytes(flipped)
        assert file_digest(large) == sha256("one")
    for text in ("", "7", '{"sha256": "00"}'):
        remembered.write_text(text)
        assert file_digest(large) == sha256("one")


def test_a_cache_that_cannot_be_read_or_written_costs_only_time(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may be that of several users."""
    cache_folder().write_text("a file")
    assert file_digest(large) == sha256("one")
    cache_folder().unlink()
    file_digest(large)

    def refuse(path: Path, encoding: str | None = None) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert file_digest(large) == sha256("one")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("LLMTRAIN_CACHE", "there"),
        ("XDG_CACHE_HOME", "there/llmtrain"),
        ("HOME", "there/.cache/llmtrain"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    for variable in ("LLMTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "there"))
    assert cache_folder() == tmp_path / folder
