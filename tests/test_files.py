"""Files and folders that are complete or absent, whoever else works beside them."""

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from llmtrain import files
from llmtrain.errors import UserError, explain
from llmtrain.files import (
    append_json_line,
    cache_folder,
    local_path,
    new_folder,
    read_object,
    sync,
    sync_tree,
    write_json,
)


def test_a_read_only_file_is_synced_by_a_user_who_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    original = os.open

    def open_for_reading(path: Path, flags: int) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR)
        return original(path, flags)

    monkeypatch.setattr(os, "open", open_for_reading)
    sync_tree(tmp_path)


def test_two_processes_with_the_same_id_do_not_share_a_temporary_folder(tmp_path: Path) -> None:
    """Containers that share a file system number their processes alike."""
    with new_folder(tmp_path / "model") as first:
        (first / "weights").write_text("first")
        with new_folder(tmp_path / "model") as second:
            (second / "weights").write_text("second")
        assert (tmp_path / "model" / "weights").read_text() == "second"
        assert (first / "weights").read_text() == "first"

    assert (tmp_path / "model" / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_replaces_neither_a_file_nor_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """The work that fills it would be lost when the folder gets its name."""
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "model").symlink_to(tmp_path / "purged")

    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="a dead link, no folder"), new_folder(path):
            pass

    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "model"]
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


def test_a_folder_that_fails_to_be_filled_leaves_nothing_and_keeps_the_old_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()

    def fill() -> None:
        with new_folder(tmp_path / "model") as working:
            (working / "weights").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()

    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model"]


def test_a_folder_that_cannot_be_renamed_keeps_the_old_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    rename = Path.rename

    def fill() -> None:
        with new_folder(tmp_path / "model") as working:

            def refuse(path: Path, target: Path) -> Path:
                if path == working:
                    raise OSError("the file server is away")
                return rename(path, target)

            monkeypatch.setattr(files.Path, "rename", refuse)

    with pytest.raises(OSError, match="the file server is away"):
        fill()

    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("umask", [pytest.param(0o022, id="022"), pytest.param(0o077, id="077")])
@pytest.mark.parametrize("write", [append_json_line, write_json])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(
    write: Callable[[Path, dict[str, int]], None], umask: int, tmp_path: Path
) -> None:
    """Under umask 077, no other user can read the metrics of a run."""
    path = tmp_path / "metrics.jsonl"

    previous_umask = os.umask(umask)
    try:
        write(path, {"step": 1})
    finally:
        os.umask(previous_umask)

    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


# fsync(2), and what file systems answer that cannot sync a folder at all
@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP", "EBADF", "EACCES", "EISDIR", "ENOSYS"])
def test_a_file_system_need_not_be_able_to_syncs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_to_sync(name, monkeypatch)
    sync(tmp_path)


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EROFS"])
def test_a_sync_that_fails_is_an_error_that_names_what_may_be_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"step": 1})
    _fail_to_sync(name, monkeypatch)

    reason = os.strerror(getattr(errno, name))
    with pytest.raises(OSError, match=reason) as caught:
        sync(tmp_path)
    assert str(explain(caught.value)).startswith(f"{tmp_path}: {reason}; ")

    with pytest.raises(OSError, match=reason) as caught:
        write_json(path, {"step": 2})
    assert re.match(rf"{tmp_path}/.tmp-status.json-\w+: {reason}; ", str(explain(caught.value)))
    assert path.read_text() == '{\n  "step": 1\n}\n'
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_of_a_library_in_rust_names_what_was_written(tmp_path: Path) -> None:
    """tokenizers raises a plain ``Exception``; /dev/full is always out of space."""

    def write_tokenizer() -> None:
        with new_folder(tmp_path / "model") as working:
            (working / "tokenizer.json").symlink_to("/dev/full")
            Tokenizer(BPE()).save(str(working / "tokenizer.json"))

    with pytest.raises(OSError, match="No space left on device") as caught:
        write_tokenizer()

    line = str(explain(caught.value))
    assert line.startswith(f"{tmp_path}/model: No space left on device; free some space")
    assert not [*tmp_path.iterdir()]


def _fail_to_sync(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    monkeypatch.setattr(os, "fsync", fail)


def test_a_file_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that cannot read run.json would begin a new run next to it."""

    def refuse(path: Path, encoding: str | None = None) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")  # as a read on NFS raises it

    monkeypatch.setattr(files.Path, "read_text", refuse)

    with pytest.raises(PermissionError) as caught:
        read_object(tmp_path / "run.json")
    assert str(explain(caught.value)).startswith(f"{tmp_path}/run.json: Permission denied; ")


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    """Libraries in Rust, and the files of a run, write names in UTF-8."""
    with pytest.raises(UserError, match=r"^--output_dir n.\xe9: this name is not UTF-8"):
        local_path(os.fsdecode(b"n\xff\xc3\xa9"), "--output_dir ")
    assert local_path("n\xe9") == "n\xe9"


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
