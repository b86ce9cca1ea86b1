"""`llmtrain runs check` says how a run stands, says what a resume would do, and changes nothing."""

import json
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch

from llmtrain.commands import runs
from llmtrain.models.hub_models import origin_of
from llmtrain.quantities import size_text
from llmtrain.record import checkpoint
from llmtrain.record.checkpoint import newest_valid, path_of
from llmtrain.record.resume import lock_of
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from tests.record.test_checkpoint import DAMAGE, Files, flip
from tests.test_cli import ended

LOSSES = {10: 2.5, 20: 2.125, 30: 2.25}
STATUS = {
    "state": "preempted",
    "step": 30,
    "reason": "asked to stop by SIGTERM",
    "time": "2026-01-01T00:00:00+0000",
}


def save(folder: Path, step: int, loss: float | None = None, fingerprint: str = "mine") -> Path:
    weights = {"w": torch.full((64,), float(step))}
    state = {"step": step, "eval_loss": loss, "fingerprint_sha256": fingerprint}
    Saver(folder, Files(), keep=100).save(
        step,
        weights,
        {"optimizer": FlatState({}, {"w.exp_avg": weights["w"] * 2})},
        state,
    )
    return path_of(folder, step)


def make(folder: Path, status: dict, steps: dict[int, float]) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"format_version": 1, "fingerprint_sha256": "mine"})
    )
    (folder / "status.json").write_text(json.dumps(status))
    for step, loss in steps.items():
        save(folder / "checkpoints", step, loss)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run", STATUS, LOSSES)


def check(capsys: pytest.CaptureFixture, path: Path) -> tuple[int, str, dict[int, str]]:
    """Return the status, all that was said, and the line of each step in the order in which they came."""
    status, out, err = ended(capsys, "runs", "check", str(path))
    assert not err
    return (
        status,
        out,
        {int(line.split()[0]): line for line in out.splitlines() if line.split()[0].isdigit()},
    )


def test_a_whole_run_is_listed_newest_first_with_its_best_and_what_a_resume_takes(
    run: Path, capsys
) -> None:
    status, out, lines = check(capsys, run)
    assert status == 0
    assert "preempted at step 30" in out
    assert "asked to stop by SIGTERM" in out
    assert [*lines] == [30, 20, 10]
    assert all("intact" in line and f"{LOSSES[step]:.4f}" in line for step, line in lines.items())
    assert [step for step, line in lines.items() if "a resume loads this one" in line] == [30]
    assert [step for step, line in lines.items() if "best eval loss" in line] == [20]
    size = sum(
        path.stat().st_size
        for path in (run / "checkpoints/step-00000030").rglob("*")
        if path.is_file()
    )
    assert f" {size_text(size)} " in lines[30]


def test_another_model_than_the_run_began_with_is_named_with_status_1(
    run: Path, tmp_path: Path, capsys
) -> None:
    model = tmp_path / "base"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"the weights")
    record = json.loads((run / "run.json").read_text())
    record["settings"] = {"model_name_or_path": {"value": str(model), "origin": "command line"}}
    record["fingerprint"] = {"initial_weights": {"weights": origin_of(str(model))}}
    (run / "run.json").write_text(json.dumps(record))
    status, out, _ = check(capsys, run)
    assert status == 0
    assert "changed" not in out

    (model / "model.safetensors").write_bytes(b"THE WEIGHTS")
    status, out, _ = check(capsys, run)
    assert status == 1
    assert f"{model} has other weights than the run began with" in out


def test_json_says_what_the_lines_say(run: Path, capsys) -> None:
    DAMAGE["a truncated file"](run / "checkpoints/step-00000030")
    _, _, lines = check(capsys, run)
    status, out, _ = ended(capsys, "runs", "check", str(run), "--json")
    found = json.loads(out)
    assert (status, found["well"]) == (1, False)
    assert [one["step"] for one in found["checkpoints"]] == [30, 20, 10]
    assert found["checkpoints"][0]["fault"] in lines[30]
    assert [one["is_resumable"] for one in found["checkpoints"]] == [False, True, False]
    assert [one["eval_loss"] for one in found["checkpoints"]] == [
        LOSSES[step] for step in (30, 20, 10)
    ]
    assert "asked to stop by SIGTERM" in found["summary"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_with_status_1_and_a_resume_takes_what_it_would_take(
    damage: str, run: Path, capsys
) -> None:
    DAMAGE[damage](run / "checkpoints/step-00000030")
    status, _, lines = check(capsys, run)
    taken = newest_valid(run / "checkpoints", False, "mine")
    fault = checkpoint.find_fault(run / "checkpoints/step-00000030")
    assert status == 1
    assert fault
    assert fault in lines[30]
    assert "intact" not in lines[30]
    assert taken is not None
    assert [f"step-{step:08d}" for step, line in lines.items() if "a resume loads" in line] == [
        taken.name
    ]


def test_an_older_one_that_is_damaged_is_status_1(run: Path, capsys) -> None:
    flip(run / "checkpoints/step-00000010/model/model.safetensors")
    status, _, lines = check(capsys, run)
    assert status == 1
    assert "a resume loads this one" in lines[30]
    assert "differs from its hash" in lines[10]


def test_a_checkpoint_of_another_run_is_not_taken(run: Path, capsys) -> None:
    save(run / "checkpoints", 40, fingerprint="theirs")
    status, _, lines = check(capsys, run)
    assert status == 1
    assert "it belongs to another run" in lines[40]
    assert "a resume loads this one" in lines[30]


def test_folders_set_aside_and_leftovers_are_named(run: Path, capsys) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000010").rename(folder / "damaged-step-00000010")
    (folder / ".tmp-step-00000040-123").mkdir()
    (run / ".tmp-abc").write_text("{")
    status, out, _ = check(capsys, run)
    assert status == 0, "the newest is whole"
    for name in ("damaged-step-00000010", ".tmp-step-00000040-123", ".tmp-abc"):
        assert name in out
    with lock_of(run):
        assert ".tmp-step-00000040-123 is being written" in check(capsys, run)[1]
    for path in folder.glob("step-*"):
        shutil.rmtree(path)
    (run / "status.json").write_text(json.dumps(STATUS | {"state": "failed"}))
    status, out, _ = check(capsys, run)
    assert status == 1, "a resume would refuse"
    assert "no checkpoint is left" in out


@pytest.mark.parametrize(
    ("state", "step", "status", "says"),
    [
        ("running", 0, 0, "no checkpoint has been made yet"),
        ("failed", 3, 0, "no checkpoint has been made yet"),
        ("running", 10, 1, "no checkpoint is left"),
        ("preempted", 10, 1, "no checkpoint is left"),
        ("finished", 10, 1, "no checkpoint is left"),
    ],
)
def test_a_run_without_a_checkpoint_says_whether_one_is_missing(
    state: str, step: int, status: int, says: str, tmp_path: Path, capsys
) -> None:
    found, out, lines = check(capsys, make(tmp_path / "run", {"state": state, "step": step}, {}))
    assert (found, lines) == (status, {})
    assert f"{state} at step {step}" in out
    assert says in out


def test_a_run_that_another_process_holds_is_in_progress_and_a_killed_one_is_not(
    tmp_path: Path, capsys
) -> None:
    run = make(
        tmp_path / "run", {"state": "running", "step": 10, "host": os.uname().nodename}, {10: 1.0}
    )
    assert "was killed" in check(capsys, run)[1]
    with lock_of(run):
        out = check(capsys, run)[1]
        assert "in progress" in out
        assert "killed" not in out
    assert "was killed" in check(capsys, run)[1]
    with lock_of(run).acquire(blocking=False):  # the check keeps no lock
        pass


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_no_fault(
    run: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune_first(path: Path, fingerprint: str | None) -> str | None:
        if path.name.endswith("10"):
            shutil.rmtree(path)
        return find_fault(path, fingerprint)

    find_fault = checkpoint.find_fault
    monkeypatch.setattr(checkpoint, "find_fault", prune_first)
    status, _, lines = check(capsys, run)
    assert (status, [*lines]) == (0, [30, 20])


def tree(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return the inode, mode, time of change and content of each path."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = stat.st_ino, stat.st_mode, stat.st_mtime_ns, content
    return found


@pytest.mark.parametrize("held", [False, True])
def test_nothing_is_changed(held: bool, run: Path, capsys) -> None:
    folder = run / "checkpoints"
    flip(folder / "step-00000030/model/model.safetensors")
    (folder / "damaged-step-00000005").mkdir()
    (folder / ".tmp-step-00000040-123").mkdir()
    if held:
        with lock_of(run):
            pass
        os.utime(run / ".lock", (1, 1))
    before = tree(run)
    for path in (run, folder, folder / "step-00000030", folder / "step-00000020"):
        check(capsys, path)
    assert tree(run) == before


def test_the_checkpoints_folder_and_one_checkpoint_may_be_named(
    run: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(run / "checkpoints/step-00000010/optimizer/state.safetensors")
    assert check(capsys, run / "checkpoints") == check(capsys, run)
    status, out, lines = check(capsys, run / "checkpoints/step-00000020")
    assert (status, [*lines]) == (0, [20])
    assert "preempted at step 30" in out
    assert check(capsys, run / "checkpoints/step-00000010")[0] == 1
    monkeypatch.chdir(run / "checkpoints")
    assert check(capsys, Path()) == check(capsys, run)
    monkeypatch.chdir(run / "checkpoints/step-00000020")
    assert check(capsys, Path()) == (status, out, lines)


def test_files_that_hold_something_else_are_no_traceback(run: Path, capsys) -> None:
    for name in ("status.json", "run.json", "checkpoints/step-00000030/state.json"):
        (run / name).write_text("[1]")
    status, out, lines = check(capsys, run)
    assert status == 1
    assert "no status.json can be read" in out
    assert "state.json differs from its hash" in lines[30]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["check", "no/such/run"], "no/such/run is neither a run folder nor a checkpoint"),
        (["check", "{here}"], "is neither a run folder nor a checkpoint"),
        (["check", "{here}/file"], "is neither a run folder nor a checkpoint"),
        (["check"], "RUN"),
        (["mend", "{here}"], "give one folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], says: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "file").write_text("")
    status, out, err = ended(capsys, "runs", *[word.format(here=tmp_path) for word in argv])
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_read_is_one_line(
    run: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, _: bool) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(runs, "_check", denied)
    status, _, err = ended(capsys, "runs", "check", str(run))
    assert status == 2
    assert err == f"error: {run} could not be read: Permission denied.\n"


def test_runs_are_listed_with_state_losses_and_age_the_newest_first(tmp_path: Path, capsys) -> None:
    old = make(tmp_path / "runs" / "old", STATUS, {})
    new = make(
        tmp_path / "runs" / "sweep" / "new",
        STATUS | {"state": "running", "host": platform.node()},
        {},
    )
    (new / "run.json").write_text(
        json.dumps({"format_version": 1, "settings": {"max_steps": {"value": 60}}})
    )
    lines = [
        {"step": 0, "eval/loss": 9.0},
        {"step": 40, "train/loss": 2.5},
        {"step": 40, "eval/loss": 3.25},
    ]
    (new / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 50, "tr'
    )
    for path in old.iterdir():
        os.utime(path, (1e9, 1e9))
    status, out, err = ended(capsys, "runs", str(tmp_path / "runs"))
    assert (status, err) == (0, "")
    first, second = (line.split() for line in out.splitlines()[1:])
    assert first[:5] == [str(new), "killed", "40/60", "2.5000", "3.2500"]
    assert second[:3] == [str(old), "preempted", "30"]
    assert second[-1] == "d"
    with lock_of(new).acquire():
        assert "running" in ended(capsys, "runs", str(tmp_path / "runs"))[1]
    status, out, _ = ended(capsys, "runs", str(tmp_path / "runs"), "--json")
    found = json.loads(out)
    assert [(run["state"], run["loss"], run["eval_loss"]) for run in found] == [
        ("killed", 2.5, 3.25),
        ("preempted", None, None),
    ]


def test_runs_are_sorted_by_a_loss_and_those_without_one_come_last(tmp_path: Path, capsys) -> None:
    losses = {"a": 3.0, "b": 2.0, "c": None, "d": 4.0}
    for name, loss in losses.items():
        folder = make(tmp_path / "runs" / name, STATUS, {})
        entry = {"step": 1, "train/loss": 1.0} | ({} if loss is None else {"eval/loss": loss})
        (folder / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    _, out, _ = ended(capsys, "runs", str(tmp_path / "runs"), "--sort", "eval_loss")
    names = [Path(line.split()[0]).name for line in out.splitlines()[1:]]
    assert names == ["b", "a", "d", "c"]
    status, _, err = ended(capsys, "runs", str(tmp_path / "runs"), "--sort", "size")
    assert status == 2
    assert "invalid choice: 'size'" in err


def test_a_run_of_another_machine_may_be_running_there(tmp_path: Path, capsys) -> None:
    make(tmp_path / "runs" / "far", STATUS | {"state": "running", "host": "elsewhere"}, {})
    assert "running" in ended(capsys, "runs", str(tmp_path / "runs"))[1]


def test_a_step_of_an_extended_run_is_repeated_in_the_run_that_made_it(
    tmp_path: Path, capsys
) -> None:
    run = make(tmp_path / "run-2", STATUS, {})
    extends = {"run": "runs/run", "step": 20, "start_times": []}
    (run / "run.json").write_text(json.dumps({"format_version": 1, "extends": extends}))
    status, _, err = ended(capsys, "replay", str(run), "--step", "20")
    assert status == 2
    assert "llmtrain replay runs/run --step 20" in err


@pytest.mark.parametrize(
    ("state", "status"), [("finished", 0), ("preempted", 1), ("failed", 1), ("running", 1)]
)
def test_scripts_can_ask_whether_a_run_is_finished(
    state: str, status: int, tmp_path: Path, capsys
) -> None:
    run = make(tmp_path / "run", STATUS | {"state": state}, {})
    found, out, err = ended(capsys, "runs", "--finished", str(run))
    assert (found, err, out.count("\n")) == (status, "", 1)
    assert f"run       {run}: {state} at step 30" in out
    found, out, _ = ended(capsys, "runs", "--finished", str(run), "--json")
    assert found == status
    assert json.loads(out)["step"] == 30


def test_what_is_no_run_is_neither_finished_nor_unfinished(tmp_path: Path, capsys) -> None:
    for words in (["--finished", str(tmp_path)], ["--finished", str(tmp_path), "runs"]):
        status, out, err = ended(capsys, "runs", *words)
        assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    "words", [["check"], ["check", "a", "b"], ["a", "b"], ["absent"], ["check", "a", "--json"]]
)
def test_what_lists_nothing_is_one_line(words: list[str], capsys) -> None:
    status, _, err = ended(capsys, "runs", *words)
    assert (status, err.count("\n")) == (2, 1)
