"""Disks whose calls fail for a moment, and disks without locks. The failing calls are real ones; see tests/failing_calls.py."""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from llmtrain.files import UnreadableError
from llmtrain.lab.doctor import local_checks
from llmtrain.record.checkpoint import find_fault, newest_valid, path_of, state_hashes
from llmtrain.record.history import History, is_free
from tests.command_line import run_cli
from tests.failing_calls import failing, needs_failing_calls
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, Ended, long_form, run, torchrun
from tests.record.checkpoint_files import save_checkpoint

pytestmark = needs_failing_calls

# Prints the newest intact checkpoint.
NEWEST = """
import sys
from pathlib import Path
from llmtrain import files
from llmtrain.record.checkpoint import newest_valid

files.RETRY_PAUSES = (0, 0)
print(newest_valid(Path(sys.argv[1]), set_aside=True))
"""

# Deletes all checkpoints but the newest and the best.
PRUNE = """
import sys
from pathlib import Path
from llmtrain import files
from llmtrain.record.checkpoint import prune

files.RETRY_PAUSES = (0, 0)
prune(Path(sys.argv[1]), keep=1, verified=[])
"""

CHECK = """
import sys
from llmtrain import files
from llmtrain.cli import main

files.RETRY_PAUSES = (0, 0)
main(["runs", "check", sys.argv[1]])
"""

RESTORE = """
import sys
from pathlib import Path
from llmtrain import launch
from llmtrain.record.tensor_files import read_tensors

launch(lambda: list(read_tensors(Path(sys.argv[1]))))
"""

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
from llmtrain import files, launch
from llmtrain.record.saver import Saver

files.RETRY_PAUSES = (0, 0)
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


# --- reads


@pytest.mark.parametrize(
    ("kind", "error", "path"),
    [
        ("read", "ESTALE", "step-00000020/MANIFEST.json"),
        ("read", "EIO", "step-00000020/optimizer/state.safetensors"),
        ("open", "ENOMEM", "step-00000020/state.json"),
    ],
)
def test_a_read_that_fails_once_is_no_damage(
    kind: str, error: str, path: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "checkpoints", 10)
    newest = save_checkpoint(tmp_path / "checkpoints", 20)

    ended = started(tmp_path, NEWEST, newest.parent, **failing(kind, error, path))

    assert ended.out == f"{newest}\n", ended.err
    assert sorted(path.name for path in newest.parent.iterdir()) == [
        "step-00000010",
        "step-00000020",
    ]


def test_tensors_that_cannot_be_read_any_more_are_one_line(tmp_path: Path) -> None:
    """A checkpoint is verified before it is restored, but the disk may fail in between."""
    folder = save_checkpoint(tmp_path / "checkpoints", 10) / "optimizer"
    file = "optimizer/state.safetensors"

    ended = started(tmp_path, RESTORE, folder, **failing("read", "EIO", file))

    [error] = error_lines(ended)
    assert ended.status == 2
    assert f"{folder}" in error
    assert "Input/output error" in error


def test_checkpoints_that_cannot_be_listed_are_neither_damaged_nor_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own ``Path.glob`` finds nothing in such a folder, without an error."""
    path = save_checkpoint(tmp_path, 10)

    def fail(path: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("llmtrain.files.RETRY_PAUSES", (0, 0))
    with monkeypatch.context() as patches:
        patches.setattr(os, "scandir", fail)
        patches.setattr(os, "listdir", fail)
        for look in (newest_valid, is_free):
            with pytest.raises(UnreadableError, match="cannot be read: Stale file handle"):
                look(tmp_path)
        with pytest.raises(UnreadableError, match="step-00000010 cannot be read: Stale file"):
            find_fault(path)


def test_nothing_is_deleted_while_the_best_checkpoint_is_not_known(tmp_path: Path) -> None:
    for step, loss in [(10, 1.0), (20, 2.0), (30, 3.0)]:
        save_checkpoint(tmp_path / "checkpoints", step, loss)

    env = failing("read", "EIO", "step-00000010/state.json", times=10**6)
    ended = started(tmp_path, PRUNE, tmp_path / "checkpoints", **env)
    assert ended.err.startswith("note: no checkpoint was deleted: ")
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 3

    started(tmp_path, PRUNE, tmp_path / "checkpoints").assert_ok()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000030"]


def test_a_check_tells_an_unreadable_checkpoint_from_an_intact_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoints", 10)
    save_checkpoint(tmp_path / "checkpoints", 20)

    env = failing("read", "EIO", "step-00000020/model", times=10**6)
    ended = started(tmp_path, CHECK, tmp_path, **env)

    assert ended.status == 1
    newest, older = re.findall(r"^ +\d+ .*", ended.out, re.MULTILINE)
    assert "step-00000020 cannot be read: Input/output error" in newest
    assert older.endswith("  intact"), "a resume would not load it"


def test_a_run_survives_a_full_disk_at_its_start_and_a_disk_that_cannot_be_read_at_its_restart(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"

    # A first start that fails does not use up the name of the run.
    ended = train(tmp_path, text_file, **failing("rename", "ENOSPC", "run/run.json"))
    assert ended.status == 2
    assert len(error_lines(ended)) == 1
    assert f"{folder} (new)" in train(tmp_path, text_file).assert_ok().out
    status, _, _ = run_cli(capsys, "runs", "--finished", str(folder))
    assert status == 0

    # As if the run had been killed in the last step.
    last = path_of(checkpoints, 6)
    bits = state_hashes(last)
    shutil.rmtree(last)
    shutil.rmtree(folder / "model")
    (folder / "status.json").write_text('{"state": "running", "step": 4}')
    names = sorted(path.name for path in checkpoints.iterdir())

    ended = train(
        tmp_path,
        text_file,
        SLURM_RESTART_COUNT="1",
        **failing("read", "ESTALE", "/checkpoints/", times=10**6),
    )
    assert ended.status == 2
    [line] = error_lines(ended)
    assert "step-00000004/MANIFEST.json cannot be read: Stale file handle" in line
    assert sorted(path.name for path in checkpoints.iterdir()) == names

    # A record that cannot be read for a moment is not taken for a missing one.
    ended = train(tmp_path, text_file, **failing("read", "EIO", "run/run.json")).assert_ok()
    assert f"{folder} (resumes from step 4)" in ended.out
    assert state_hashes(last) == bits
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 4]


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
    [finding] = [item for item in local_checks.findings(tmp_path) if item.subject == "run folder"]
    assert "has no locks" in finding.text


@long_form
def test_two_processes_share_a_cache_without_locks(text_file: Path, tmp_path: Path) -> None:
    env = failing("flock", "EOPNOTSUPP", str(tmp_path), times=10**6)
    flags = ["--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    command = [*torchrun(2), GPT, *TINY, *flags]

    ended = run(command, env={"LLMTRAIN_CACHE": str(tmp_path / "cache"), **env}).assert_ok()

    assert ended.err.count(f"{tmp_path / 'cache'} is on a file system without locks") == 2
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
