"""Disks whose calls fail for a moment, and disks without locks. The failing calls are real ones; see tests/failing_calls.py."""

import errno
import fcntl
from pathlib import Path

import pytest

from llmtrain.lab.doctor import local_checks
from llmtrain.record.history import History
from tests.failing_calls import failing, needs_failing_calls
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, Ended, long_form, run, torchrun

pytestmark = needs_failing_calls

# Raises an error while it holds the lock of a run.
FAILING_RUN = """
import sys
from llmtrain.record.resume import choose_folder

with choose_folder(sys.argv[1], "auto", {}):
    sys.exit("the real error")
"""

# The recipe. With LLMTRAIN_TEST_KILL its process ends when step 4 is saved, as if it were killed.
RECIPE = """
import os, sys
sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.record.saver import Saver

if "LLMTRAIN_TEST_KILL" in os.environ:
    save = Saver.save
    def save_and_end(self, step, *arguments, **options):
        save(self, step, *arguments, **options)
        if step == 4:
            os._exit(1)
    Saver.save = save_and_end
launch(gpt.main)
"""


def started(folder: Path, script: str, *arguments: object, **env: str) -> Ended:
    """Run a script in a process whose environment has further variables."""
    path = folder / "script.py"
    path.write_text(script)
    return run_forked([*PYTHON, str(path), *map(str, arguments)], env=env)


def train(folder: Path, text_file: Path, **env: str) -> Ended:
    """Train six steps into ``run`` of a folder, with a checkpoint after every second one."""
    flags = ["--save_steps", "2", "--dataset", text_file, "--output_dir", folder / "run"]
    return started(folder, RECIPE, *TINY, *flags, LLMTRAIN_CACHE=str(folder / "cache"), **env)


def error_lines(ended: Ended) -> list[str]:
    assert "Traceback" not in ended.err
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


# --- locks


def folders_without_locks(ended: Ended) -> list[str]:
    """Return the names of the folders that the notes of a process name."""
    assert "Traceback" not in ended.err
    notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    return [Path(line.split(" is on a file system without locks")[0]).name for line in notes]


def test_a_run_on_a_disk_without_locks_is_resumed_in_its_folder(
    text_file: Path, tmp_path: Path
) -> None:
    no_locks = failing("flock", "ENOSYS", str(tmp_path), times=10**6)

    killed = train(tmp_path, text_file, LLMTRAIN_TEST_KILL="1", **no_locks)
    assert killed.status == 1, killed.err
    assert folders_without_locks(killed) == ["cache", "run"]
    # The name of a machine or a process in this file would keep other machines out.
    assert (tmp_path / "run/.lock").read_text() == ""

    resumed = train(tmp_path, text_file, **no_locks).assert_ok()
    assert f"{tmp_path / 'run'} (resumes from step 4)" in resumed.out
    assert folders_without_locks(resumed) == ["run"]


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_a_disk_whose_locks_fail_is_used_without_them(error: str, tmp_path: Path) -> None:
    env = failing("flock", error, str(tmp_path), times=10**6)
    ended = started(tmp_path, FAILING_RUN, tmp_path / "run", **env)

    assert folders_without_locks(ended) == ["run"]
    assert ended.err.splitlines()[-1] == "the real error"


def test_readers_of_a_folder_without_locks_do_not_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "status.json").write_text('{"state": "running"}')

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)

    history = History.read(tmp_path)
    assert history.state == "running", "it may not have been killed"
    assert "not known" in history.summary()
    [finding] = local_checks._folder(tmp_path)
    assert "has no locks" in finding.text


@long_form
def test_two_processes_share_a_cache_without_locks(text_file: Path, tmp_path: Path) -> None:
    env = failing("flock", "EOPNOTSUPP", str(tmp_path), times=10**6)
    flags = ["--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    command = [*torchrun(2), GPT, *TINY, *flags]

    ended = run(command, env={"LLMTRAIN_CACHE": str(tmp_path / "cache"), **env}).assert_ok()

    assert ended.err.count(f"{tmp_path / 'cache'} is on a file system without locks") == 1
    assert [*(tmp_path / "cache").glob(".tmp-*")] == []


def test_an_unlock_that_fails_hides_neither_an_error_nor_a_success(
    text_file: Path, tmp_path: Path
) -> None:
    unlock_fails = failing("flock", "ESTALE", "run/.lock", after=1, times=10**6)

    ended = started(tmp_path, FAILING_RUN, tmp_path / "run", **unlock_fails)
    assert ended.err == "the real error\n"

    train(tmp_path, text_file, **unlock_fails).assert_ok()


# --- leftovers


def test_leftovers_that_cannot_be_deleted_do_not_stop_a_start(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder = tmp_path / "run"
    (folder / "checkpoints/.tmp-step").mkdir(parents=True)
    (folder / ".tmp-link").symlink_to(elsewhere)
    (folder / ".tmp-file").touch()
    (folder / "checkpoints/.tmp-step/.nfs0001").touch()
    (folder / "checkpoints/.tmp-step/weights").touch()

    begin = "import sys; from pathlib import Path; from llmtrain.record.folder import RunFolder\n"
    begin += "RunFolder(Path(sys.argv[1]), 'id', is_main=True).begin(0)"
    env = failing("unlink", "EBUSY", ".nfs0001", times=10**6)
    started(tmp_path, begin, folder, **env).assert_ok()

    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.tmp-*/*"))
    assert names == ["checkpoints/.tmp-step/.nfs0001"]
    assert not (folder / ".tmp-link").is_symlink()
    assert not (folder / ".tmp-file").exists()
    assert (elsewhere / "file").exists()
