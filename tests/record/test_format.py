"""Files of a newer format are refused in one line, and nothing in their folder changes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.record.checkpoint import find_fault, newest_valid, read_state
from llmtrain.record.history import History
from llmtrain.record.resume import choose_folder
from tests.test_cli import ended
from tests.test_runs import save

FINGERPRINT = {"seed": 0}
CHECKPOINT = "checkpoints/step-00000020"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make an unfinished run with two checkpoints."""
    folder = tmp_path / "run"
    for step in (10, 20):
        save(folder / "checkpoints", step, fingerprint=digest(FINGERPRINT))
    record = {
        "format_version": 1,
        "run_id": "abc",
        "fingerprint_sha256": digest(FINGERPRINT),
        "starts": [],
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text('{"state": "running", "step": 20}')
    return folder


def start(folder: Path, resume: str) -> None:
    with choose_folder(str(folder), resume, FINGERPRINT):
        pass


def write_newer_version(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format_version": 2}))


def write_newer_state(checkpoint: Path) -> None:
    """Write the newer version into state.json, and its new hash into the manifest."""
    state = checkpoint / "state.json"
    write_newer_version(state)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    raw = state.read_bytes()
    hashed = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest.get("files", manifest)["state.json"] = hashed
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder; ``None`` stands for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


def assert_refused(action: Callable[[], object], file: Path, folder: Path) -> None:
    before = contents(folder)

    with pytest.raises(UserError) as error:
        action()

    assert str(error.value) == (
        f"{file} has format version 2, but this llmtrain reads version 1: upgrade llmtrain."
    )
    assert contents(folder) == before


@pytest.mark.parametrize(
    "read",
    [
        lambda run: start(run, "auto"),
        History.of_run,
        History.read,
    ],
    ids=["start", "history", "history of any folder"],
)
def test_a_run_of_a_newer_format_is_refused(read: Callable[[Path], object], run: Path) -> None:
    write_newer_version(run / "run.json")
    assert_refused(lambda: read(run), run / "run.json", run)


@pytest.mark.parametrize("words", [["runs", "check", "."], ["report", "."], ["diff", ".", "."]])
def test_commands_refuse_a_run_of_a_newer_format(
    words: list[str],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    write_newer_version(run / "run.json")
    before = contents(run)
    monkeypatch.chdir(run)

    status, out, err = ended(capsys, *words)

    assert (status, out) == (2, "")
    assert "run.json has format version 2" in err
    assert err.count("\n") == 1
    assert contents(run) == before


@pytest.mark.parametrize("words", [["report", "."], ["diff", ".", "."], ["replay", "."]])
def test_a_run_without_a_format_version_is_refused_in_one_line(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["format_version"]
    (run / "run.json").write_text(json.dumps(record))
    monkeypatch.chdir(run)

    more = ["--step", "1"] if words[0] == "replay" else []
    status, out, err = ended(capsys, *words, *more)

    assert (status, out) == (2, "")
    assert "run.json was written by an earlier llmtrain" in err
    assert err.count("\n") == 1


def test_a_run_of_a_newer_format_does_not_hide_the_other_runs_of_a_list(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(run, run.with_name("newer"))
    write_newer_version(run.with_name("newer") / "run.json")

    status, out, err = ended(capsys, "runs", str(run.parent))

    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", str(run)]
    assert err.startswith("note: ")
    assert "newer/run.json has format version 2" in err
    assert err.count("\n") == 1


READERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda run: start(run, "auto"),
    "resume from the run": lambda run: start(run.with_name("new"), str(run)),
    "resume from the checkpoint": lambda run: start(run.with_name("new"), str(run / CHECKPOINT)),
    "newest": lambda run: newest_valid(run / "checkpoints", set_aside=True),
    "verify": lambda run: find_fault(run / CHECKPOINT),
}


@pytest.mark.parametrize("name", READERS)
def test_a_checkpoint_whose_manifest_has_a_newer_format_is_refused_and_not_set_aside(
    name: str, run: Path
) -> None:
    manifest = run / CHECKPOINT / "MANIFEST.json"
    write_newer_version(manifest)
    assert_refused(lambda: READERS[name](run), manifest, run)


@pytest.mark.parametrize("name", READERS)
def test_a_checkpoint_whose_state_has_a_newer_format_is_refused_and_not_set_aside(
    name: str, run: Path
) -> None:
    write_newer_state(run / CHECKPOINT)
    assert_refused(lambda: READERS[name](run), run / CHECKPOINT / "state.json", run)


def test_the_state_of_a_newer_format_is_not_read(run: Path) -> None:
    write_newer_state(run / CHECKPOINT)
    state = run / CHECKPOINT / "state.json"
    assert_refused(lambda: read_state(run / CHECKPOINT), state, run)


def test_a_newer_version_that_differs_from_its_hash_is_damage(run: Path) -> None:
    write_newer_version(run / CHECKPOINT / "state.json")
    assert find_fault(run / CHECKPOINT) == "state.json differs from its hash"


@pytest.mark.parametrize("version", [None, 0, "1", True])
def test_a_manifest_without_a_version_that_is_known_is_damage(version: object, run: Path) -> None:
    manifest = run / CHECKPOINT / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format_version": version}))

    assert find_fault(run / CHECKPOINT) == f"MANIFEST.json has format version {version}, not 1"


def test_a_checkpoint_bears_the_version_in_both_of_its_files(run: Path) -> None:
    for name in ("state.json", "MANIFEST.json"):
        assert json.loads((run / CHECKPOINT / name).read_text())["format_version"] == 1
