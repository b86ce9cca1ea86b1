"""A refactoring leaves every digit of short runs as it was: `make digits` compares this tree with an earlier commit."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.launching import ROOT
from tests.system.digits import differences, measure, tensors_digest

BASE = os.environ.get("LLMTRAIN_BASE")  # a commit


@pytest.mark.skipif(BASE is None, reason="make digits runs it; a change of arithmetic must fail it")
@pytest.mark.timeout(1800)
def test_every_digit_is_that_of_the_earlier_commit(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    earlier_tree = tmp_path / "before"
    git = ["git", "-C", str(ROOT)]
    subprocess.run(
        [*git, "worktree", "add", "--detach", str(earlier_tree), str(BASE)],
        check=True,
        capture_output=True,
    )
    try:
        before = measure(earlier_tree, tmp_path / "runs-before")
        after = measure(ROOT, tmp_path / "runs-now")
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(earlier_tree)], check=True)

    assert differences(before, after) == []
    score(f"digits: {len(after)} runs equal those of {BASE} to the last bit")


def test_a_different_digit_is_named() -> None:
    before = {"a run": {"train/loss": {"1": 0.5}, "tokens": {"1": 8}}}
    after = {"a run": {"train/loss": {"1": 0.5000001}, "tokens": {"1": 8}}, "new": {"tokens": {}}}
    assert differences(before, before) == []
    assert differences(before, after) == ["a run: train/loss", "new: tokens"]


def test_a_different_bit_of_a_tensor_changes_its_digest(tmp_path: Path) -> None:
    weight = torch.linspace(0, 1, 6, dtype=torch.bfloat16).view(2, 3)
    changed = weight.clone()
    changed.view(torch.int16)[1, 2] ^= 1
    for name, tensor in {"weight": weight, "same": weight.clone(), "changed": changed}.items():
        save_file({"w": tensor, "scalar": torch.tensor(1.5)}, tmp_path / name)

    assert tensors_digest(tmp_path / "weight") == tensors_digest(tmp_path / "same")
    assert tensors_digest(tmp_path / "weight") != tensors_digest(tmp_path / "changed")
