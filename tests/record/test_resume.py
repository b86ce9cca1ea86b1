"""Fingerprints are compared as JSON reads them: a file has strings as keys, and no tuples."""

from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.files import digest, write_json
from llmtrain.json_types import JsonObject
from llmtrain.record.resume import ResumePoint, choose_folder
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


def start(folder: Path, seed: int, resume: str = "auto") -> ResumePoint:
    with choose_folder(str(folder), resume, fingerprint_of(seed)) as resume_point:
        return resume_point


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """An unfinished run with the seed 0 and a checkpoint of step 10."""
    folder = tmp_path / "run"
    fingerprint = fingerprint_of(seed=0)
    identity = {"fingerprint": fingerprint, "fingerprint_sha256": digest(fingerprint)}
    save_step(Saver(folder / "checkpoints", Files(), keep=1), 10, tokens=320, **identity)
    write_json(
        folder / "run.json", {"format_version": 1, "run_id": "abc", "starts": [], **identity}
    )
    write_json(folder / "status.json", {"state": "preempted", "step": 10})
    return folder


def test_the_reason_for_a_new_run_is_a_key_that_differs_and_not_its_form_in_json(
    stopped_run: Path,
) -> None:
    resume_point = start(stopped_run, seed=1)

    assert resume_point.folder == stopped_run.with_name("run-2")
    assert resume_point.reason == (
        f"new; {stopped_run} is taken by a run with a different seed: 0 there, 1 here"
    )


def test_a_run_with_the_same_fingerprint_is_resumed(stopped_run: Path) -> None:
    resume_point = start(stopped_run, seed=0)

    assert resume_point.folder == stopped_run
    assert resume_point.step == 10


def test_a_named_checkpoint_with_the_same_fingerprint_is_resumed(
    stopped_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_point = start(tmp_path / "extended", seed=0, resume=str(stopped_run))

    assert resume_point.folder == tmp_path / "extended"
    assert resume_point.step == 10
    assert "changed" not in capsys.readouterr().out


def test_a_named_checkpoint_with_another_seed_is_refused_for_the_seed(
    stopped_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has a different seed: 0 there, 1 here; resume with the"):
        start(tmp_path / "extended", seed=1, resume=str(stopped_run))
