"""A start resumes the run with its fingerprint, and starts at the same moment share no folder."""

import contextlib
import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import JsonObject, digest, write_json
from llmtrain.record import resume
from llmtrain.record.resume import ResumePoint, choose_folder
from llmtrain.record.run_record import FORMAT_VERSION
from llmtrain.record.saver import Saver
from tests.record.checkpoint_files import Files, save_step


def fingerprint_of(seed: int) -> JsonObject:
    """Return a fingerprint with numbers as keys, and with tuples.

    Some configurations of transformers have both.
    """
    return {
        "model": {"id2label": {0: "negative", 1: "positive"}, "patch_size": (2, 2)},
        "metrics": {"hits": {5: (1, 5)}},
        "seed": seed,
    }


def start(folder: Path, seed: int, checkpoint: str = "auto") -> ResumePoint:
    with choose_folder(str(folder), checkpoint, fingerprint_of(seed)) as resume_point:
        return resume_point


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """An unfinished run with the seed 0 and a checkpoint of step 10."""
    folder = tmp_path / "run"
    fingerprint = fingerprint_of(seed=0)
    identity = {"fingerprint": fingerprint, "fingerprint_sha256": digest(fingerprint)}
    save_step(Saver(folder / "checkpoints", Files(), keep=1), 10, best={"step": 10}, **identity)
    record = {"format_version": FORMAT_VERSION, "run_id": "abc", "starts": [], **identity}
    write_json(folder / "run.json", record)
    write_json(folder / "status.json", {"state": "preempted", "step": 10})
    return folder


def test_the_reason_for_a_new_run_is_a_key_that_differs_and_not_its_form_in_json(
    stopped_run: Path,
) -> None:
    resume_point = start(stopped_run, seed=1)

    assert resume_point.folder == stopped_run.with_name("run-2")
    assert resume_point.reason == (
        f"new; {stopped_run} is taken by a run that differs in seed: 0 there, 1 here"
    )


def test_a_run_with_the_same_fingerprint_is_resumed(stopped_run: Path) -> None:
    resume_point = start(stopped_run, seed=0)

    assert resume_point.folder == stopped_run
    assert resume_point.step == 10
    assert resume_point.state["best"] == {"step": 10}


def test_a_named_checkpoint_with_the_same_fingerprint_is_resumed(
    stopped_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_point = start(tmp_path / "extended", seed=0, checkpoint=str(stopped_run))

    assert resume_point.folder == tmp_path / "extended"
    assert resume_point.step == 10
    assert resume_point.state["best"] is None, "the other run may delete it"
    assert "changed" not in capsys.readouterr().out


def test_a_named_checkpoint_with_another_seed_is_refused_for_the_seed(
    stopped_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="differs in seed: 0 there, 1 here; resume with the"):
        start(tmp_path / "extended", seed=1, checkpoint=str(stopped_run))


def test_a_run_that_began_elsewhere_is_not_continued_from_a_named_checkpoint(
    stopped_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped_run, tmp_path / "other")

    resume_point = start(stopped_run, seed=0, checkpoint=str(tmp_path / "other"))

    assert resume_point.folder == stopped_run.with_name("run-2")


def test_a_run_that_another_start_finishes_meanwhile_is_not_continued(
    stopped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def lock_late(path: Path, timeout: float) -> Iterator[bool]:
        """Take the lock when the other start has finished the run."""
        if path.parent == stopped_run:
            write_json(stopped_run / "status.json", {"state": "finished", "step": 10})
        yield True

    monkeypatch.setattr(resume, "file_lock", lock_late)

    assert start(stopped_run, seed=0).folder == stopped_run.with_name("run-2")


# --- starts at the same moment

STARTS = 5
ROUNDS = 4

fork = multiprocessing.get_context("fork")


def choose_and_hold(output_dir: Path, seed: int, begin: Barrier, end: Barrier) -> None:
    """Choose a folder when all other starts do, record it, and hold it until all have chosen."""
    begin.wait(timeout=30)
    with choose_folder(str(output_dir), "auto", fingerprint_of(seed)) as point:
        (point.folder / f"start-{point.step}").touch(exist_ok=False)
        end.wait(timeout=30)


def start_at_once(output_dir: Path, seeds: Sequence[int]) -> list[str]:
    """Start runs at the same moment. Return the folder and the step that each of them chose."""
    begin = fork.Barrier(len(seeds))
    end = fork.Barrier(len(seeds))
    starts = []
    for seed in seeds:
        arguments = (output_dir, seed, begin, end)
        starts.append(fork.Process(target=choose_and_hold, args=arguments, daemon=True))
    for start in starts:
        start.start()
    for start in starts:
        start.join(timeout=40)

    assert [start.exitcode for start in starts] == [0] * len(seeds)
    records = output_dir.parent.glob("*/start-*")
    return sorted(f"{record.parent.name}/{record.name}" for record in records)


NEW_FOLDERS = [f"run-{number}/start-0" for number in range(2, STARTS + 1)]


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "empty"])
def test_starts_at_the_same_moment_take_one_folder_each(is_there: bool, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        output_dir = tmp_path / str(number) / "run"
        if is_there:
            output_dir.mkdir(parents=True)

        assert start_at_once(output_dir, range(STARTS)) == [*NEW_FOLDERS, "run/start-0"]


def test_only_one_of_the_starts_at_the_same_moment_resumes_a_run(
    stopped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_WAIT_SECONDS", 0.1)

    assert start_at_once(stopped_run, [0] * STARTS) == [*NEW_FOLDERS, "run/start-10"]
