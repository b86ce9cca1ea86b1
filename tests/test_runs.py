"""`llmtrain runs` lists runs, and checks the checkpoints of one without changing anything."""

import json
import os
import platform
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import pytest

from llmtrain.console import size_text
from llmtrain.record import checkpoint
from llmtrain.record.checkpoint import newest_valid
from tests.command_line import run_cli
from tests.record.checkpoint_files import DAMAGE, flip, save_checkpoint

PREEMPTED = {
    "state": "preempted",
    "step": 30,
    "reason": "asked to stop by SIGTERM",
    "time": "2026-01-01T00:00:00+0000",
}
EVAL_LOSSES = {10: 2.5, 20: 2.125, 30: 2.25}  # of the checkpoints of `run`, by step


def make_run(
    folder: Path, status: dict[str, Any], eval_losses: dict[int, float] | None = None
) -> Path:
    """Make a run folder with a checkpoint for each step of ``eval_losses``."""
    (folder / "checkpoints").mkdir(parents=True)
    write_json(folder / "run.json", {"format_version": 2, "fingerprint_sha256": "mine"})
    write_json(folder / "status.json", status)
    for step, loss in (eval_losses or {}).items():
        save_checkpoint(folder / "checkpoints", step, loss)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A preempted run with three checkpoints. The newest is not the best."""
    return make_run(tmp_path / "run", PREEMPTED, EVAL_LOSSES)


# --- runs check


class Check(NamedTuple):
    """The output of `llmtrain runs check`."""

    status: int
    out: str
    lines: dict[int, str]  # the lines of the checkpoints by step, in the printed order

    def steps_with(self, text: str) -> list[int]:
        return [step for step, line in self.lines.items() if text in line]


def check(capsys: pytest.CaptureFixture[str], path: Path) -> Check:
    status, out, err = run_cli(capsys, "runs", "check", str(path))
    assert not err

    lines = {}
    for line in out.splitlines():
        first_word = line.split()[0]
        if first_word.isdigit():
            lines[int(first_word)] = line
    return Check(status, out, lines)


def test_an_intact_run_is_described_with_its_checkpoints_the_newest_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = check(capsys, run)

    assert result.status == 0
    assert "preempted at step 30" in result.out
    assert "asked to stop by SIGTERM" in result.out
    assert [*result.lines] == [30, 20, 10]
    for step, line in result.lines.items():
        assert "intact" in line
        assert f"{EVAL_LOSSES[step]:.4f}" in line
    assert result.steps_with("a resume loads this one") == [30]
    assert result.steps_with("best eval loss") == [20]

    newest = run / "checkpoints" / "step-00000030"
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    assert f" {size_text(size)} " in result.lines[30]


@pytest.mark.parametrize("damage", ["a truncated file", "a missing manifest"])
def test_damage_is_named_and_the_check_names_the_checkpoint_that_a_resume_loads(
    damage: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = run / "checkpoints" / "step-00000030"
    DAMAGE[damage](damaged)
    fault = checkpoint.find_fault(damaged)
    assert fault

    result = check(capsys, run)
    assert result.status == 1
    assert fault in result.lines[30]
    assert "intact" not in result.lines[30]
    assert result.steps_with("a resume loads this one") == [20]

    status, out, _ = run_cli(capsys, "runs", "check", str(run), "--json")
    report = json.loads(out)
    assert (status, report["well"]) == (1, False)
    checkpoints = report["checkpoints"]
    assert {entry["step"]: entry["eval_loss"] for entry in checkpoints} == EVAL_LOSSES
    assert checkpoints[0]["fault"] == fault
    assert [entry["is_resumable"] for entry in checkpoints] == [False, True, False]
    assert newest_valid(run / "checkpoints", False, "mine") == run / "checkpoints/step-00000020"


def test_a_checkpoint_that_no_resume_would_load_is_a_fault(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints/step-00000010/model/model.safetensors")
    save_checkpoint(run / "checkpoints", 40, fingerprint="of another run")

    result = check(capsys, run)

    assert result.status == 1
    assert "differs from its hash" in result.lines[10]
    assert "another run" in result.lines[40]
    assert result.steps_with("a resume loads this one") == [30]


def test_damaged_folders_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000010").rename(folder / "damaged-step-00000010")

    result = check(capsys, run)

    assert result.status == 0, "the newest checkpoint is intact"
    assert "damaged-step-00000010" in result.out


@pytest.mark.parametrize(
    ("state", "step", "damaged", "status"),
    [
        ("running", 0, False, 0),
        ("failed", 3, False, 0),
        ("failed", 3, True, 1),
        ("running", 10, False, 1),
        ("preempted", 10, False, 1),
        ("finished", 10, False, 1),
    ],
)
def test_a_run_without_a_checkpoint_is_at_fault_only_if_it_must_have_had_one(
    state: str,
    step: int,
    damaged: bool,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path / "run", {"state": state, "step": step})
    if damaged:
        (run / "checkpoints" / "damaged-step-00000010").mkdir()

    result = check(capsys, run)

    assert result.status == status
    assert result.lines == {}
    assert f"{state} at step {step}" in result.out
    assert ("no checkpoint is left" in result.out) is bool(status)


def test_a_running_status_means_killed_unless_a_process_has_the_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"state": "running", "step": 10, "host": os.uname().nodename}
    run = make_run(tmp_path / "run", status, {10: 1.0})

    assert "was killed" in check(capsys, run).out
    # This fails if the check has kept the lock.
    with filelock.FileLock(run / ".lock").acquire(blocking=False):
        result = check(capsys, run)
    assert "in progress" in result.out
    assert "killed" not in result.out


def file_states(folder: Path) -> dict[Path, tuple[int, int, int, bytes]]:
    """Return inode, mode, time and content of a folder and of everything in it."""
    states = {}
    for path in [folder, *folder.rglob("*")]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        states[path] = (stat.st_ino, stat.st_mode, stat.st_mtime_ns, content)
    return states


@pytest.mark.parametrize("has_lock_file", [False, True])
def test_a_check_changes_nothing(
    has_lock_file: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    flip(folder / "step-00000030/model/model.safetensors")
    (folder / "damaged-step-00000005").mkdir()
    (folder / ".tmp-step-00000040-123").mkdir()
    if has_lock_file:
        with filelock.FileLock(run / ".lock"):
            pass
        os.utime(run / ".lock", (1, 1))
    before = file_states(run)

    check(capsys, run)

    assert file_states(run) == before


def test_files_with_unexpected_json_are_faults(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("status.json", "run.json", "checkpoints/step-00000030/state.json"):
        (run / name).write_text("[1]")

    result = check(capsys, run)

    assert result.status == 1
    assert "no status.json can be read" in result.out
    assert "state.json differs from its hash" in result.lines[30]


# --- the list


def list_runs(capsys: pytest.CaptureFixture[str], flags: str) -> list[list[str]]:
    """Return the columns of `llmtrain runs`, without the heading."""
    status, out, err = run_cli(capsys, "runs", *shlex.split(flags))
    assert (status, err) == (0, "")
    return [line.split() for line in out.splitlines()[1:]]


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """Make a folder with the run "old", which has no loss, and "sweep/new", which was killed."""
    make_run(tmp_path / "runs/old", PREEMPTED)
    running = PREEMPTED | {"state": "running", "host": platform.node()}
    running["time"] = "2026-02-01T00:00:00+0000"
    new = make_run(tmp_path / "runs/sweep/new", running)
    write_json(new / "run.json", {"format_version": 2, "settings": {"max_steps": {"value": 60}}})
    (new / "metrics.jsonl").write_text(
        '{"step": 0, "eval/loss": 9.0}\n'
        '{"step": 40, "train/loss": 2.5}\n'
        '{"step": 40, "eval/loss": 3.25}\n'
        '{"step": 50, "tr'
    )
    return tmp_path / "runs"


def test_runs_are_listed_with_state_losses_and_age_the_newest_first(
    two_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = list_runs(capsys, str(two_runs))
    assert new[:5] == [f"{two_runs}/sweep/new", "killed", "40/60", "2.5000", "3.2500"]
    assert old[:3] == [f"{two_runs}/old", "preempted", "30"]
    assert old[-1] == "d", "its age is in days"

    with filelock.FileLock(two_runs / "sweep/new/.lock"):
        new, _ = list_runs(capsys, str(two_runs))
    assert new[1] == "running"

    _, out, _ = run_cli(capsys, "runs", str(two_runs), "--json")
    new_json, old_json = json.loads(out)
    assert (new_json["state"], new_json["loss"], new_json["eval_loss"]) == ("killed", 2.5, 3.25)
    assert (old_json["state"], old_json["loss"]) == ("preempted", None)


def test_runs_sorted_by_a_loss_come_before_those_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"third": ', "eval/loss": 4.0', "first": ', "eval/loss": 2.0', "without": ""}
    diverged = '}\n{"step": 2, "eval/loss": null'
    losses["diverged"] = ', "eval/loss": 1.0' + diverged
    losses["exploded"] = ', "eval/loss": 6053818176.0'
    for name, loss in losses.items():
        folder = make_run(tmp_path / "runs" / name, PREEMPTED)
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": 1.0{loss}}}\n')

    rows = list_runs(capsys, f"{tmp_path}/runs --sort eval_loss")

    names = [Path(columns[0]).name for columns in rows]
    assert names[:3] == ["first", "third", "exploded"]
    assert "6.05e+09" in rows[names.index("exploded")], "it stays in its column"
    assert "nan" in rows[names.index("diverged")]


# --- runs --finished


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("preempted", 1), ("running", 1)])
def test_the_exit_status_tells_whether_a_run_is_finished(
    state: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", PREEMPTED | {"state": state, "host": "elsewhere"})
    for flags in ([], ["--json"]):
        ended, text, err = run_cli(capsys, "runs", "--finished", str(run), *flags)
        assert (ended, err) == (status, "")
        assert state in text
    ended, _, err = run_cli(capsys, "runs", "--finished", str(run), "--sort", "loss")
    assert (ended, err.count("no --sort")) == (2, 1)
