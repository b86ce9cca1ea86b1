"""Files in a newer or an earlier format are refused with one line, and no file changes."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.record.checkpoint import find_fault, newest_valid, read_state
from llmtrain.record.resume import choose_folder
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
    content["format_version"] = 2
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
    by_path: dict[Path, bytes | None] = {}
    for path in folder.rglob("*"):
        if path.name != ".lock":
            by_path[path] = path.read_bytes() if path.is_file() else None
    return by_path


def assert_refused(action: Callable[[], object], file: Path, folder: Path) -> None:
    before = contents(folder)

    with pytest.raises(UserError) as error:
        action()

    assert str(error.value) == (
        f"{file} has format version 2, but this llmtrain reads version 1: upgrade llmtrain."
    )
    assert contents(folder) == before


def test_a_run_of_a_newer_format_is_not_resumed(run: Path) -> None:
    write_newer_version(run / "run.json")
    assert_refused(lambda: start(run, "auto"), run / "run.json", run)


NEWER = {"format_version": 2}, "has format version 2"
WITHOUT_VERSION = {}, "was written by an earlier llmtrain"


@pytest.mark.parametrize(
    ("command", "version", "message"),
    [
        ("runs check .", *NEWER),
        ("report .", *NEWER),
        ("diff . .", *NEWER),
        ("report .", *WITHOUT_VERSION),
        ("diff . .", *WITHOUT_VERSION),
        ("rows . --step 1", *WITHOUT_VERSION),
    ],
)
def test_commands_refuse_a_run_of_another_format(
    command: str,
    version: dict[str, int],
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["format_version"]
    (run / "run.json").write_text(json.dumps(record | version))
    before = contents(run)
    monkeypatch.chdir(run)

    status, out, err = run_cli(capsys, *command.split())

    assert status == 2
    assert out == ""
    assert f"run.json {message}" in err
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
    assert "newer/run.json has format version 2" in err
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

    assert find_fault(run / CHECKPOINT) == f"MANIFEST.json has format version {version}, not 1"


@pytest.mark.parametrize("name", ["state.json", "MANIFEST.json"])
def test_the_files_of_a_checkpoint_have_the_format_version(name: str, run: Path) -> None:
    assert json.loads((run / CHECKPOINT / name).read_text())["format_version"] == 1


# --- a run that an earlier version has written


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(Path(__file__).with_name(name)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


@pytest.fixture
def earlier_run(tmp_path: Path) -> Path:
    """An unfinished run of commit 78add705, with a checkpoint after step 2 of 4."""
    return unpack("run_of_an_earlier_version.tar.gz", tmp_path)


@pytest.fixture
def adafactor_run(tmp_path: Path) -> Path:
    """An unfinished run of commit 104f03dc with ``--optim adafactor``, which was removed later."""
    return unpack("run_with_removed_flags.tar.gz", tmp_path)


def test_a_run_of_an_earlier_version_is_refused_and_neither_changed_nor_called_damaged(
    earlier_run: Path,
) -> None:
    checkpoint = earlier_run / "checkpoints" / "step-00000002"
    fingerprint = json.loads((earlier_run / "run.json").read_text())["fingerprint"]
    before = contents(earlier_run)

    for folder, resume in (
        (earlier_run, "auto"),
        (earlier_run.with_name("new"), str(earlier_run)),
        (earlier_run.with_name("new"), str(checkpoint)),
    ):
        with (
            pytest.raises(UserError, match=f"^{checkpoint} was written by an earlier llmtrain"),
            choose_folder(str(folder), resume, fingerprint),
        ):
            pass
        assert contents(earlier_run) == before


@pytest.mark.parametrize(
    "command", ["runs RUN", "report RUN", "export RUN/checkpoints/step-00000002"]
)
def test_commands_read_a_run_of_an_earlier_version(
    command: str, earlier_run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = run_cli(capsys, *command.replace("RUN", str(earlier_run)).split())

    assert (status, err) == (0, "")


def test_a_run_with_a_removed_flag_is_read_and_another_run_begins(
    adafactor_run: Path, capsys: pytest.CaptureFixture
) -> None:
    for command in ["runs RUN", "report RUN", "diff RUN RUN"]:
        status, _, err = run_cli(capsys, *command.replace("RUN", str(adafactor_run)).split())
        assert (status, err) == (0, "")
    before = contents(adafactor_run)
    fingerprint = json.loads((adafactor_run / "run.json").read_text())["fingerprint"]
    fingerprint["optimizer"]["optim"] = "adamw"

    with choose_folder(str(adafactor_run), "auto", fingerprint) as resume_point:
        assert resume_point.folder == adafactor_run.with_name("run-2")
        assert "adafactor" in resume_point.reason

    assert contents(adafactor_run) == before
