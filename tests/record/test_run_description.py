"""The description of a run covers the code that runs, and differences are told by name."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.record.run_description import check_ranks_agree, named_difference, run_description
from llmtrain.record.running_code import code_digest, git_commit
from tests.record.two_ranks import TwoRanks

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


@pytest.mark.parametrize("name", ["llmtrain_helper.py", "lib/llmtrain_nested.py"])
def test_the_digest_covers_imported_modules_next_to_the_script(
    name: str, import_helper: ImportHelper
) -> None:
    helper = import_helper(name)
    before = code_digest()
    assert code_digest() == before

    helper.write_text("RATE = 2\n")

    assert code_digest() != before


def test_the_digest_covers_the_script(script: Path) -> None:
    before = code_digest()

    script.write_text("RATE = 2\n")

    assert code_digest() != before


def test_the_digest_covers_modules_that_are_imported_later(
    script: Path, import_helper: ImportHelper
) -> None:
    helper = script.parent / "llmtrain_helper.py"
    nested = script.parent / "lib" / "llmtrain_nested.py"
    nested.parent.mkdir()
    for module in (helper, nested):
        module.write_text("RATE = 1\n")
    script.write_text(
        "def train():\n    import llmtrain_helper\n    from lib import llmtrain_nested\n"
    )

    before = code_digest()
    import_helper(helper.name)
    assert code_digest() == before, "importing a module changes nothing"

    nested.write_text("RATE = 2\n")
    assert code_digest() != before


def test_the_digest_leaves_out_installed_packages_and_other_scripts(
    script: Path, import_helper: ImportHelper
) -> None:
    installed = import_helper(".venv/lib/site-packages/llmtrain_installed.py")
    before = code_digest()

    installed.write_text("RATE = 2\n")
    (script.parent / "other.py").write_text("RATE = 2\n")

    assert code_digest() == before


# --- ranks with other code


def describe() -> dict[str, Any]:
    return run_description(fingerprint={}, settings={}, precision="no")


def test_ranks_with_different_modules_stop_with_the_name_of_the_file(
    import_helper: ImportHelper,
) -> None:
    helper = import_helper("llmtrain_helper.py")
    team = TwoRanks(describe())

    helper.write_text("RATE = 2\n")

    with pytest.raises(UserError, match=r"rank 1 differs from rank 0 in code: llmtrain_helper\.py"):
        check_ranks_agree(team, describe())


def test_a_rank_may_import_a_module_that_the_other_ranks_do_not_need(
    import_helper: ImportHelper,
) -> None:
    team = TwoRanks(describe())

    import_helper("llmtrain_helper.py")

    check_ranks_agree(team, describe())


def test_ranks_that_were_started_with_different_scripts_stop(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = TwoRanks(describe())

    other_script = script.with_name("other.py")
    other_script.write_text("RATE = 2\n")
    monkeypatch.setattr("sys.argv", [str(other_script)])

    with pytest.raises(UserError, match="rank 1 differs from rank 0 in code: script"):
        check_ranks_agree(team, describe())


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
    "records": 3,
    "train_tokens": 100,
    "eval_tokens": 10,
    "tokenizer": "byte",
    "vocabulary": 257,
    "settings": {"model_name_or_path": {"value": "runs/base/model"}},
}


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        pytest.param("data", {"dataset": "b.txt"}, "a.txt there, b.txt here", id="another file"),
        pytest.param(
            "data",
            {"train_tokens": 90},
            "a.txt has another content (train tokens 100 there, 90 here)",
            id="another size",
        ),
        pytest.param(
            "data", {}, "a.txt has another content (of the same size)", id="another content"
        ),
        pytest.param(
            "tokenizer",
            {"tokenizer": "char", "vocabulary": 60},
            "byte there, char here, vocabulary 257 there, 60 here",
            id="another tokenizer",
        ),
    ],
)
def test_a_difference_between_hashes_names_the_files(key: str, changes: dict, message: str) -> None:
    difference = named_difference(
        key,
        before="0" * 64,
        now="1" * 64,
        before_record=RECORD,
        now_record=RECORD | changes,
    )

    assert difference == message


def test_a_difference_between_hashes_without_a_record_shows_the_hashes() -> None:
    difference = named_difference(
        "data", before="abc", now="xyz", before_record={}, now_record=RECORD
    )

    assert difference == "abc there, xyz here"


@pytest.mark.parametrize(
    ("model", "now", "message"),
    [
        pytest.param(
            "runs/other/model",
            {"weights": {"sha256": "1" * 64}, "lora": {"lora_r": 4}},
            "model runs/base/model there, runs/other/model here, "
            "lora None there, {'lora_r': 4} here",
            id="another model with LoRA",
        ),
        pytest.param(
            "runs/base/model",
            {"weights": {"sha256": "1" * 64}, "lora": None},
            "runs/base/model has other weights now",
            id="other weights",
        ),
    ],
)
def test_a_difference_between_initial_weights_names_the_models(
    model: str, now: dict[str, Any], message: str
) -> None:
    difference = named_difference(
        "initial_weights",
        before={"weights": {"sha256": "0" * 64}, "lora": None},
        now=now,
        before_record=RECORD,
        now_record=RECORD | {"settings": {"model_name_or_path": {"value": model}}},
    )

    assert difference == message
