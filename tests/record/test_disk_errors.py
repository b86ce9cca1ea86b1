"""Disks whose calls fail for a moment, and disks without locks. The failing calls are real ones; see tests/failing_calls.py."""

from pathlib import Path

from tests.failing_calls import failing, needs_failing_calls
from tests.forked import run_forked
from tests.launching import PYTHON, Ended

pytestmark = needs_failing_calls


def started(folder: Path, script: str, *arguments: object, **env: str) -> Ended:
    """Run a script in a process whose environment has further variables."""
    path = folder / "script.py"
    path.write_text(script)
    return run_forked([*PYTHON, str(path), *map(str, arguments)], env=env)


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
