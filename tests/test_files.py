"""Files and folders that are complete or absent, whoever else works beside them."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain import files
from llmtrain.errors import UserError
from llmtrain.files import append_json_line, new_folder, write_json

NOBODY = 65534


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield a folder that every user may enter and write into."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def run_without_privileges(action: Callable[[], None]) -> str:
    """Run an action in a child process that is not root's, and return its error, if any."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        error = ""
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action()
        except BaseException as failure:
            error = repr(failure)
        os.write(writer, error.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()


def test_a_read_only_folder_is_copied_by_a_user_who_is_not_root(public_folder: Path) -> None:
    source = public_folder / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "config.json").chmod(0o444)
    source.chmod(0o555)

    def export() -> None:
        with new_folder(public_folder / "export") as working:
            shutil.copytree(source, working, dirs_exist_ok=True)

    assert run_without_privileges(export) == ""
    assert (public_folder / "export" / "config.json").read_text() == "{}"


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


def test_a_folder_is_replaced_although_a_process_with_the_same_id_left_its_own_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    stale = tmp_path / f".tmp-replaced-model-{os.getpid()}"
    stale.mkdir()
    (stale / "weights").write_text("older")

    with new_folder(tmp_path / "model") as working:
        (working / "weights").write_text("new")

    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert (stale / "weights").read_text() == "older"


def test_a_folder_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")

    with (
        pytest.raises(UserError, match="is a file, which no folder"),
        new_folder(tmp_path / "metrics.jsonl"),
    ):
        pass

    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


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
