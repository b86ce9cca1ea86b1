"""The description of a run covers the code that runs, and differences are told by name."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import Team
from llmtrain.record import run_record
from llmtrain.record.run_record import (
    check_ranks_agree,
    code_sha256,
    first_difference,
    git_commit,
    run_description,
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script of the user, with which this process seems to have been started."""
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text("import helper\n")
    monkeypatch.setattr("sys.argv", [str(path), "--max_steps", "3"])
    return path


# --- the hash of the code


def test_the_hash_of_the_code_covers_the_script_and_no_other(script: Path) -> None:
    before = code_sha256()
    (script.parent / "other.py").write_text("RATE = 2\n")
    assert code_sha256() == before

    script.write_text("RATE = 2\n")
    assert code_sha256() != before


def test_the_hash_of_the_code_covers_the_package(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "llmtrain" / "record" / "run_record.py"
    module.parent.mkdir(parents=True)
    module.write_text("RATE = 1\n")
    monkeypatch.setattr(run_record, "__file__", str(module))
    before = code_sha256()

    (tmp_path / "llmtrain" / "loop.py").write_text("RATE = 2\n")

    assert code_sha256() != before


# --- ranks that would train different things


class TwoRanks(Team):
    """Stands for two ranks. This one is rank 0, and the other one always has the same answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        return [action(), self.answer]


def describe(
    *, seed: int = 0, dataset: str = "here", data: str = "abc"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description of a rank, and the details of its data."""
    settings = {
        "seed": {"value": seed, "from": "recipe"},
        "dataset": {"value": dataset, "from": "command line"},
    }
    description = run_description(fingerprint={"data": data}, settings=settings, precision="no")
    return description, {"dataset": f"{data}.txt"}


def test_ranks_that_would_train_different_things_stop_with_both_values(script: Path) -> None:
    description, details = describe()
    script.write_text("RATE = 2\n")
    other_script, _ = describe()
    others = {
        "flags: seed 1 on rank 1, 0 on rank 0.": describe(seed=1),
        "data: dataset xyz.txt on rank 1, abc.txt on rank 0.": describe(data="xyz"),
        "versions: ": (description | {"versions": {}}, details),
        "code: llmtrain or the recipe has another content there.": (other_script, details),
    }
    for difference, other in others.items():
        with pytest.raises(UserError, match=f"^rank 1 differs from rank 0 in {difference}"):
            check_ranks_agree(TwoRanks(other), description, details)


def test_ranks_may_have_their_data_in_different_places() -> None:
    check_ranks_agree(TwoRanks(describe(dataset="there")), *describe(dataset="here"))


# --- the git commit


def git(folder: Path, arguments: str) -> str:
    """Run git with arguments that have no spaces in them, and return its output."""
    command = f"git -c user.name=a -c user.email=a@b {arguments}"
    completed = subprocess.run(
        command.split(), cwd=folder, check=True, capture_output=True, text=True
    )
    return completed.stdout.strip()


def test_the_commit_of_a_run_says_whether_tracked_files_have_changed(script: Path) -> None:
    project = script.parent
    assert git_commit() is None

    git(project, "init -q")
    git(project, "add train.py")
    git(project, "commit -q -m first")
    commit = git(project, "rev-parse HEAD")
    (project / "notes.txt").write_text("an untracked file")
    assert git_commit() == commit

    script.write_text("RATE = 2\n")
    assert git_commit() == f"{commit}-dirty"


# --- differences between two runs

RECORD = {
    "dataset": "a.txt",
    "train_tokens": 100,
    "tokenizer": "byte",
    "vocabulary": 257,
    "settings": {"model_name_or_path": {"value": "runs/base/model"}},
}
WEIGHTS = {"weights": {"sha256": "0" * 64}, "lora": None}
OTHER_WEIGHTS = {"weights": {"sha256": "1" * 64}, "lora": None}
OTHER_MODEL = {"settings": {"model_name_or_path": {"value": "runs/other/model"}}}


@pytest.mark.parametrize(
    ("key", "before", "now", "changes", "message"),
    [
        pytest.param("data", "0", "1", {"dataset": "b"}, "dataset a.txt there, b here", id="file"),
        pytest.param("data", "0", "1", {"train_tokens": 90}, "100 there, 90 here", id="size"),
        pytest.param("data", "0", "1", {}, "a.txt has another content", id="content"),
        pytest.param("tokenizer", "0", "1", {"vocabulary": 60}, "257 there, 60", id="tokenizer"),
        pytest.param(
            "initial_weights",
            WEIGHTS,
            OTHER_WEIGHTS | {"lora": {"lora_r": 4}},
            OTHER_MODEL,
            "lora None there, {'lora_r': 4} here, weights runs/base/model there, runs/other/model",
            id="model and LoRA",
        ),
        pytest.param(
            "initial_weights",
            WEIGHTS,
            OTHER_WEIGHTS,
            {},
            "base/model has another content now",
            id="weights",
        ),
    ],
)
def test_a_difference_between_hashes_names_files_and_models(
    key: str, before: Any, now: Any, changes: dict[str, Any], message: str
) -> None:
    change = first_difference({key: before}, RECORD, {key: now}, RECORD | changes)

    assert change is not None
    assert change[0] == key
    assert message in change[1]
