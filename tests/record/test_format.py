"""Files in a newer or an earlier format are refused with one line, and no file changes."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import JsonObject, digest
from llmtrain.record.checkpoint import find_fault, newest_valid, read_state
from llmtrain.record.resume import choose_folder
from llmtrain.record.run_record import FORMAT_VERSION
from tests.command_line import run_cli
from tests.record.checkpoint_files import flip, save_checkpoint

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
        f"{FORMAT_VERSION}: upgrade llmtrain."
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


# --- a run of format 1


@pytest.fixture
def first_run(tmp_path: Path) -> Path:
    """An unfinished run of format 1, with a checkpoint after step 219.

    Commit 104f03dc has written it, with ``--optim adafactor``, which was removed later.
    """
    with tarfile.open(Path(__file__).with_name("run_of_format_1.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


FIRST_CHECKPOINT = "checkpoints/step-00000219"


def fingerprint_in(run: Path) -> JsonObject:
    fingerprint: JsonObject = json.loads((run / "run.json").read_text())["fingerprint"]
    return fingerprint


@pytest.mark.parametrize("is_same_command", [True, False])
@pytest.mark.parametrize(
    ("output_dir", "resume", "file"),
    [
        ("run", "auto", "run.json"),
        ("new", "RUN", f"{FIRST_CHECKPOINT}/MANIFEST.json"),
        ("new", f"RUN/{FIRST_CHECKPOINT}", f"{FIRST_CHECKPOINT}/MANIFEST.json"),
    ],
)
def test_a_run_of_format_1_is_not_resumed_and_no_byte_of_it_changes(
    output_dir: str, resume: str, file: str, is_same_command: bool, first_run: Path
) -> None:
    fingerprint = fingerprint_in(first_run)
    if not is_same_command:
        fingerprint["optimizer"]["optim"] = "adamw"
    before = contents(first_run.parent)

    with (
        pytest.raises(UserError) as error,
        choose_folder(
            str(first_run.with_name(output_dir)),
            resume.replace("RUN", str(first_run)),
            fingerprint,
        ),
    ):
        pass

    assert str(error.value) == (
        f"{first_run}/{file} has format version 1, and this llmtrain resumes version 2: finish the "
        "run with the llmtrain that has written it, or start a new run with "
        "--resume_from_checkpoint never."
    )
    assert contents(first_run.parent) == before


def test_damage_to_a_checkpoint_of_format_1_is_not_set_aside(first_run: Path) -> None:
    flip(first_run / FIRST_CHECKPOINT / "model" / "model.safetensors")
    before = contents(first_run.parent)

    with (
        pytest.raises(UserError, match="has format version 1"),
        choose_folder(str(first_run), "auto", fingerprint_in(first_run)),
    ):
        pass

    assert contents(first_run.parent) == before


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize(("state", "resume"), [("finished", "auto"), ("running", "never")])
def test_a_new_run_begins_next_to_one_of_format_1(
    state: str, resume: str, restarts: str, first_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    status = first_run / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": state}))
    before = contents(first_run)

    with choose_folder(str(first_run), resume, fingerprint_in(first_run)) as resume_point:
        assert resume_point.folder == first_run.with_name("run-2")
        assert resume_point.step == 0

    assert contents(first_run) == before


@pytest.mark.parametrize(
    "command",
    [
        "runs RUN",
        "runs check RUN",
        "report RUN",
        "diff RUN RUN",
        f"export RUN/{FIRST_CHECKPOINT}",
        f"generate RUN/{FIRST_CHECKPOINT} --prompt a --max_new_tokens 2",
    ],
)
def test_commands_read_a_run_of_format_1(
    command: str, first_run: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = run_cli(capsys, *command.replace("RUN", str(first_run)).split())

    assert (status, err) == (0, "")
