"""The description of a run covers the code that runs, and differences are told by name."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import Team
from llmtrain.record.run_description import check_ranks_agree, named_difference, run_description
from llmtrain.record.running_code import code_digest, git_commit

ImportHelper = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script of the user, with which this process seems to have been started."""
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text("import helper\n")
    monkeypatch.setattr("sys.argv", [str(path), "--max_steps", "3"])
    return path


@pytest.fixture
def import_helper(script: Path, monkeypatch: pytest.MonkeyPatch) -> ImportHelper:
    """A function that writes a module below the script's folder, imports it, and returns it."""

    def import_helper(name: str) -> Path:
        path = script.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("RATE = 1\n")
        monkeypatch.syspath_prepend(path.parent)
        # Set first, so that the end of the test removes the imported module.
        monkeypatch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]
        importlib.import_module(path.stem)
        return path

    return import_helper


# --- the digest of the code


@pytest.mark.parametrize("name", ["train.py", "llmtrain_helper.py", "lib/llmtrain_nested.py"])
def test_the_digest_covers_the_script_and_modules_next_to_it(
    name: str, script: Path, import_helper: ImportHelper
) -> None:
    script.write_text("import llmtrain_helper\ndef train():\n    from lib import llmtrain_nested\n")
    nested = script.parent / "lib" / "llmtrain_nested.py"
    nested.parent.mkdir()
    nested.write_text("RATE = 1\n")
    import_helper("llmtrain_helper.py")
    before = code_digest()
    import_helper("lib/llmtrain_nested.py")
    assert code_digest() == before, "importing a module later changes nothing"

    (script.parent / name).write_text("RATE = 2\n")

    assert code_digest() != before


def test_the_digest_leaves_out_installed_packages_and_other_scripts(
    script: Path, import_helper: ImportHelper
) -> None:
    installed = import_helper(".venv/lib/site-packages/llmtrain_installed.py")
    before = code_digest()

    installed.write_text("RATE = 2\n")
    (script.parent / "other.py").write_text("RATE = 2\n")

    assert code_digest() == before


# --- ranks that would train different things


class TwoRanks(Team):
    """Stands for two ranks. This one is rank 0, and the other one always has the same answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        return [action(), self.answer]


def describe(*, seed: int = 0, dataset: str = "here", data: str = "abc") -> dict[str, Any]:
    settings = {
        "seed": {"value": seed, "from": "recipe"},
        "dataset": {"value": dataset, "from": "command line"},
    }
    return run_description(fingerprint={"data": data}, settings=settings, precision="no")


def test_ranks_that_would_train_different_things_stop_with_both_values() -> None:
    others = {
        "flags: seed 1 there, 0 here.": describe(seed=1),
        "data: xyz there, abc here.": describe(data="xyz"),
        "versions: ": describe() | {"versions": {}},
    }
    for difference, other in others.items():
        with pytest.raises(UserError, match=f"^rank 1 differs from rank 0 in {difference}"):
            check_ranks_agree(TwoRanks(other), describe())


def test_ranks_with_different_modules_stop_with_the_name_of_the_file(
    script: Path, import_helper: ImportHelper
) -> None:
    script_alone = TwoRanks(describe())
    helper = import_helper("llmtrain_helper.py")
    check_ranks_agree(script_alone, describe())
    script_and_helper = TwoRanks(describe())

    helper.write_text("RATE = 2\n")
    with pytest.raises(UserError, match=r"rank 1 differs from rank 0 in code: llmtrain_helper\.py"):
        check_ranks_agree(script_and_helper, describe())

    script.write_text("RATE = 2\n")
    with pytest.raises(UserError, match="rank 1 differs from rank 0 in code: script"):
        check_ranks_agree(script_alone, describe())


def test_ranks_may_have_their_data_in_different_places() -> None:
    check_ranks_agree(TwoRanks(describe(dataset="there")), describe(dataset="here"))


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
        pytest.param("data", "0", "1", {"dataset": "b"}, "a.txt there, b here", id="file"),
        pytest.param("data", "0", "1", {"train_tokens": 90}, "100 there, 90 here", id="size"),
        pytest.param("data", "0", "1", {}, "a.txt has another content", id="content"),
        pytest.param("tokenizer", "0", "1", {"vocabulary": 60}, "257 there, 60", id="tokenizer"),
        pytest.param(
            "initial_weights",
            WEIGHTS,
            OTHER_WEIGHTS | {"lora": {"lora_r": 4}},
            OTHER_MODEL,
            "runs/base/model there, runs/other/model here, lora None there, {'lora_r': 4} here",
            id="model and LoRA",
        ),
        pytest.param(
            "initial_weights", WEIGHTS, OTHER_WEIGHTS, {}, "has other weights now", id="weights"
        ),
    ],
)
def test_a_difference_between_hashes_names_files_and_models(
    key: str, before: Any, now: Any, changes: dict[str, Any], message: str
) -> None:
    difference = named_difference(
        key, before=before, now=now, before_record=RECORD, now_record=RECORD | changes
    )

    assert message in difference
