"""A refactor leaves every digit of short runs as it was: `make digits` compares this tree with the commit before."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import ROOT
from tests.system.digits import differences, measure

BASE = os.environ.get("LLMTRAIN_BASE")  # a commit


@pytest.mark.skipif(
    BASE is None, reason="make digits runs it: a change of arithmetic is meant to fail it"
)
@pytest.mark.timeout(1200)
def test_every_digit_is_that_of_the_commit_before(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    before = tmp_path / "before"
    git = ["git", "-C", str(ROOT)]
    subprocess.run(
        [*git, "worktree", "add", "--detach", str(before), str(BASE)],
        check=True,
        capture_output=True,
    )
    try:
        expected, found = (
            measure(before, tmp_path / "runs-before"),
            measure(ROOT, tmp_path / "runs-now"),
        )
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(before)], check=True)
    assert differences(expected, found) == []
    score(f"digits: {len(found)} runs are those of {BASE}, to the last bit")


def test_a_digit_that_differs_is_named() -> None:
    one = {"a run": {"train/loss": {"1": 0.5}, "identity": "x"}}
    other = {
        "a run": {"train/loss": {"1": 0.5000001}, "identity": "x"},
        "another": {"identity": "y"},
    }
    assert differences(one, one) == []
    assert differences(one, other) == ["a run: train/loss", "another: identity"]
