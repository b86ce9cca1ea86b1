"""`make digits` compares this tree with an earlier commit: a refactoring changes no digit."""

import contextlib
import fnmatch
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.launching import ROOT
from tests.system import data_digits
from tests.system.digits import commands, differences, measure, tensors_digest

BASE = os.environ.get("LLMTRAIN_BASE")  # a commit
# Whether both commits begin with the weights of the earlier one, because random weights differ.
BEGINS_WITH_BASE = os.environ.get("LLMTRAIN_WEIGHTS") == "base"

# Runs of earlier commits that are not made any more, each with the reason.
REMOVED: dict[str, str] = {}

# Rows or messages that changed on purpose, by the reason. A star stands for any text.
CHANGED = {
    "an empty data set has one sentence with all counts": ["few records: error", "only *: error"],
    "a data set of the wrong format has one sentence": ["labelled unpaired=False *: error"],
    "an error about a record shows its value": ["bad *: error"],
    "a record of two formats is read in the first one": [
        "bad two formats *: *",
        "only two formats *: *",
    ],
    "the longest text is cut if the hash chooses all of them": ["text one eval 0.8: *"],
    "an example that truncation empties is counted, like one that is dropped": [
        "bad long truncate: *",
        "bad nothing fits truncate: *",
        "bad pair long truncate *: *",
    ],
}


@pytest.mark.skipif(BASE is None, reason="make digits runs it; a change of arithmetic must fail it")
@pytest.mark.timeout(3600)
def test_every_run_has_the_digits_of_the_earlier_commit(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    with earlier_commit(tmp_path / "before") as tree:
        assert vanished_runs(tree, tmp_path) == []
        begun = None
        if BEGINS_WITH_BASE:
            begun = tmp_path / "runs-begun"
            measure(tree, begun)
        before = measure(tree, tmp_path / "runs-before", begun)
        after = measure(ROOT, tmp_path / "runs-now", begun)

    assert differences(before, after) == []
    score(f"digits: {len(after)} runs equal those of {BASE} to the last bit")


@pytest.mark.skipif(BASE is None, reason="make digits runs it; other rows must fail it")
@pytest.mark.timeout(600)
def test_every_data_set_has_the_rows_of_the_earlier_commit(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    """Every format, template and packing is tried, in one process and in two, and errors too."""
    inputs = tmp_path / "inputs"
    data_digits.write_inputs(inputs)
    with earlier_commit(tmp_path / "before") as tree:
        before = data_digits.measure(tree, inputs, tmp_path / "before.json")
    after = data_digits.measure(ROOT, inputs, tmp_path / "now.json")

    intended = list(itertools.chain.from_iterable(CHANGED.values()))
    different = differences(before, after)
    for pattern in intended:
        different = [name for name in different if not fnmatch.fnmatch(name, pattern)]
    assert different == []
    score(f"digits: the rows of {len(after)} data sets equal those of {BASE}")


@contextlib.contextmanager
def earlier_commit(folder: Path) -> Iterator[Path]:
    """Check the earlier commit out into a folder."""
    git = ["git", "-C", str(ROOT)]
    subprocess.run(
        [*git, "worktree", "add", "--detach", str(folder), str(BASE)],
        check=True,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], check=True)


# Prints the names of the runs that the module ``digits`` of a tree makes.
LIST_RUNS = """
import json
import sys
from pathlib import Path

from tests.system.digits import commands

print(json.dumps(list(commands(Path(sys.argv[1])))))
"""


def vanished_runs(earlier_tree: Path, folder: Path) -> list[str]:
    """Return the names of runs that an earlier tree makes, and this one does not."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST_RUNS, str(folder)],
        cwd=earlier_tree,
        env={**os.environ, "PYTHONPATH": str(earlier_tree)},
        check=True,
        capture_output=True,
        text=True,
    )
    earlier_names: list[str] = json.loads(listed.stdout)
    names = commands(folder)
    return [name for name in earlier_names if name not in names and name not in REMOVED]


def test_a_run_that_vanished_is_named_unless_it_was_removed_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REMOVED, "pipeline", "pipeline stages were removed")
    package = tmp_path / "tests" / "system"
    package.mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "digits.py").write_text(
        "def commands(folder):\n    return {'adamw': 1, 'pipeline': 2, 'vanished': 3}\n"
    )

    assert vanished_runs(tmp_path, tmp_path) == ["vanished"]


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
