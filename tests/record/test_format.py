"""Files in another format are refused with one line, and no file changes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.record.checkpoint import find_fault, newest_valid, read_state
from llmtrain.record.resume import choose_folder
from llmtrain.record.run_record import FORMAT_VERSION
from tests.command_line import run_cli
from tests.record.checkpoint_files import save_checkpoint

FINGERPRINT = {"seed": 0}
CHECKPOINT = "checkpoints/step-00000020"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An unfinished run with two checkpoints."""
    folder = tmp_path / "run"
    for step in (10, 20):
        save_checkpoint(folder / "checkpoints", step, fingerprint=digest(FINGERPRINT))
    record = {
        "format_version": FORMAT_VERSION,
        "run_id": "abc",
        "fingerprint_sha256": digest(FINGERPRINT),
        "starts": [],
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text('{"state": "running", "step": 20}')
    (folder / ".lock").touch()
    return folder


def start(folder: Path, resume: str) -> None:
    with choose_folder(str(folder), resume, FINGERPRINT):
        pass


def write_newer_version(path: Path) -> None:
    content = json.loads(path.read_text())
    content["format_version"] = FORMAT_VERSION + 1
    path.write_text(json.dumps(content))


def write_newer_state(checkpoint: Path) -> None:
    """Write the newer version into state.json, and its new hash into the manifest."""
    state = checkpoint / "state.json"
    write_newer_version(state)

    manifest = checkpoint / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    data = state.read_bytes()
    content["files"]["state.json"] = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    manifest.write_text(json.dumps(content))


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return the content of every file below a folder, and ``None`` for every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(action: Callable[[], object], file: Path, folder: Path) -> None:
    before = contents(folder)

    with pytest.raises(UserError) as error:
        action()

    assert str(error.value) == (
        f"{file} has format version {FORMAT_VERSION + 1}, but this llmtrain reads version "
        f"{FORMAT_VERSION}: use the version of llmtrain that has written it."
    )
    assert contents(folder) == before


def test_a_run_of_a_newer_format_is_not_resumed(run: Path) -> None:
    write_newer_version(run / "run.json")
    assert_refused(lambda: start(run, "auto"), run / "run.json", run)


@pytest.mark.parametrize("command", ["runs check .", "report .", "diff . .", "rows . --step 1"])
def test_commands_refuse_a_run_of_a_newer_format(
    command: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    write_newer_version(run / "run.json")
    before = contents(run)
    monkeypatch.chdir(run)

    status, out, err = run_cli(capsys, *command.split())

    assert status == 2
    assert out == ""
    assert f"run.json has format version {FORMAT_VERSION + 1}" in err
    assert err.count("\n") == 1
    assert contents(run) == before


def test_a_run_of_a_newer_format_does_not_hide_the_other_runs_of_a_list(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    newer = run.with_name("newer")
    shutil.copytree(run, newer)
    write_newer_version(newer / "run.json")

    status, out, err = run_cli(capsys, "runs", str(run.parent))

    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", str(run)]
    assert err.startswith("note: ")
    assert f"newer/run.json has format version {FORMAT_VERSION + 1}" in err
    assert err.count("\n") == 1


READERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda run: start(run, "auto"),
    "resume from the run": lambda run: start(run.with_name("new"), str(run)),
    "resume from the checkpoint": lambda run: start(run.with_name("new"), str(run / CHECKPOINT)),
    "newest": lambda run: newest_valid(run / "checkpoints", set_aside=True),
    "verify": lambda run: find_fault(run / CHECKPOINT),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("write_newer", "file"),
    [
        (lambda checkpoint: write_newer_version(checkpoint / "MANIFEST.json"), "MANIFEST.json"),
        (write_newer_state, "state.json"),
    ],
)
def test_a_checkpoint_of_a_newer_format_is_refused_and_not_set_aside(
    write_newer: Callable[[Path], None], file: str, reader: str, run: Path
) -> None:
    write_newer(run / CHECKPOINT)

    assert_refused(lambda: READERS[reader](run), run / CHECKPOINT / file, run)


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_of_an_earlier_format_is_refused_and_not_set_aside(
    reader: str, run: Path
) -> None:
    manifest = run / CHECKPOINT / "MANIFEST.json"
    manifest.write_text(json.dumps({"format_version": FORMAT_VERSION - 1, "files": {}}))
    before = contents(run)

    with pytest.raises(UserError, match=f"has format version {FORMAT_VERSION - 1}, but"):
        READERS[reader](run)

    assert contents(run) == before


def test_the_state_of_a_newer_format_is_not_read(run: Path) -> None:
    write_newer_state(run / CHECKPOINT)
    state = run / CHECKPOINT / "state.json"

    assert_refused(lambda: read_state(run / CHECKPOINT), state, run)


def test_a_newer_version_that_differs_from_its_hash_is_damage(run: Path) -> None:
    write_newer_version(run / CHECKPOINT / "state.json")

    assert find_fault(run / CHECKPOINT) == "state.json differs from its hash"


@pytest.mark.parametrize("version", [None, 0, "1", True])
def test_a_manifest_with_an_unknown_version_is_damage(version: object, run: Path) -> None:
    manifest = run / CHECKPOINT / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    content["format_version"] = version
    manifest.write_text(json.dumps(content))

    assert f"has format version {version}" in str(find_fault(run / CHECKPOINT))


@pytest.mark.parametrize("name", ["state.json", "MANIFEST.json"])
def test_the_files_of_a_checkpoint_have_the_format_version(name: str, run: Path) -> None:
    assert json.loads((run / CHECKPOINT / name).read_text())["format_version"] == FORMAT_VERSION
