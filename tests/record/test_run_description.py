"""The record of a run names the code that ran."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.record.run_description import (
    check_ranks_agree,
    named_difference,
    run_description,
)
from llmtrain.record.running_code import code_digest, git_commit
from tests.record.test_team import Two

ImportHelper = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that this process was started with a script of the user's."""
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text("import helper\n")
    monkeypatch.setattr("sys.argv", [str(path), "--max_steps", "3"])
    return path


@pytest.fixture
def import_helper(script: Path, monkeypatch: pytest.MonkeyPatch) -> ImportHelper:
    """Write a module below the script's folder, import it, and return its file."""

    def go(name: str) -> Path:
        path = script.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("RATE = 1\n")
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.delitem("sys.modules", path.stem, raising=False)
        importlib.import_module(path.stem)
        return path

    yield go
    for name in ("llmtrain_helper", "llmtrain_nested", "llmtrain_installed"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["llmtrain_helper.py", "lib/llmtrain_nested.py"])
def test_the_digest_of_the_code_covers_a_module_beside_the_script(
    name: str, import_helper: ImportHelper
) -> None:
    helper = import_helper(name)
    before = code_digest()
    assert code_digest() == before

    helper.write_text("RATE = 2\n")
    assert code_digest() != before


def test_the_digest_of_the_code_is_the_same_before_and_after_a_lazy_import(
    script: Path, import_helper: ImportHelper
) -> None:
    helper = script.parent / "llmtrain_helper.py"
    nested = script.parent / "lib" / "llmtrain_nested.py"
    nested.parent.mkdir()
    nested.write_text("RATE = 1\n")
    helper.write_text("RATE = 1\n")
    script.write_text(
        "def train():\n    import llmtrain_helper\n    from lib import llmtrain_nested\n"
    )
    before = code_digest()
    import_helper("llmtrain_helper.py")
    assert code_digest() == before

    nested.write_text("RATE = 2\n")
    assert code_digest() != before


def test_the_digest_of_the_code_covers_the_script(script: Path) -> None:
    before = code_digest()
    script.write_text("RATE = 2\n")
    assert code_digest() != before


def test_the_digest_of_the_code_leaves_out_what_the_run_has_not_imported(
    script: Path, import_helper: ImportHelper
) -> None:
    installed = import_helper(".venv/lib/site-packages/llmtrain_installed.py")
    before = code_digest()

    installed.write_text("RATE = 2\n")
    (script.parent / "other.py").write_text("RATE = 2\n")
    assert code_digest() == before


def test_ranks_with_another_module_beside_the_script_stop(
    import_helper: ImportHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = import_helper("llmtrain_helper.py")
    monkeypatch.setattr(Two, "other", run_description({}, {}, "no"))
    helper.write_text("RATE = 2\n")
    with pytest.raises(UserError, match=r"rank 1 differs from rank 0 in code: llmtrain_helper\.py"):
        check_ranks_agree(Two(), run_description({}, {}, "no"))


def test_a_rank_may_import_a_module_that_the_others_do_not_need(
    import_helper: ImportHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Two, "other", run_description({}, {}, "no"))
    import_helper("llmtrain_helper.py")
    check_ranks_agree(Two(), run_description({}, {}, "no"))


def test_ranks_that_were_started_with_different_scripts_stop(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Two, "other", run_description({}, {}, "no"))
    other_script = script.with_name("other.py")
    other_script.write_text("RATE = 2\n")
    monkeypatch.setattr("sys.argv", [str(other_script)])
    with pytest.raises(UserError, match="rank 1 differs from rank 0 in code: script"):
        check_ranks_agree(Two(), run_description({}, {}, "no"))


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *author, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_of_a_run_says_whether_files_were_changed_since(script: Path) -> None:
    assert git_commit() is None

    git(script.parent, "init", "-q")
    git(script.parent, "add", "train.py")
    git(script.parent, "commit", "-qm", "first")
    commit = git(script.parent, "rev-parse", "HEAD")
    (script.parent / "notes.txt").write_text("an untracked file")
    assert git_commit() == commit

    script.write_text("RATE = 2\n")
    assert git_commit() == f"{commit}-dirty"


BEFORE = {
    "dataset": "a.txt",
    "records": 3,
    "train_tokens": 100,
    "eval_tokens": 10,
    "tokenizer": "byte",
    "vocabulary": 257,
    "settings": {"model_name_or_path": {"value": "runs/base/model"}},
}


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        ("data", {"dataset": "b.txt"}, "a.txt there, b.txt here"),
        (
            "data",
            {"train_tokens": 90},
            "a.txt has another content (train tokens 100 there, 90 here)",
        ),
        ("data", {}, "a.txt has another content (of the same size)"),
        (
            "tokenizer",
            {"tokenizer": "char", "vocabulary": 60},
            "byte there, char here, vocabulary 257 there, 60 here",
        ),
    ],
)
def test_a_difference_names_files_instead_of_hashes(key: str, changes: dict, says: str) -> None:
    assert named_difference(key, "0" * 64, "1" * 64, BEFORE, BEFORE | changes) == says


def test_a_difference_between_starts_names_the_models() -> None:
    before = {"weights": {"sha256": "0" * 64}, "lora": None}
    other = {"weights": {"sha256": "1" * 64}, "lora": {"lora_r": 4}}
    now = BEFORE | {"settings": {"model_name_or_path": {"value": "runs/other/model"}}}
    assert named_difference("initial_weights", before, other, BEFORE, now) == (
        "model runs/base/model there, runs/other/model here, lora None there, {'lora_r': 4} here"
    )
    same = named_difference("initial_weights", before, before | {"weights": 1}, BEFORE, BEFORE)
    assert same == "runs/base/model has other weights now"


def test_without_a_record_both_values_are_shown() -> None:
    assert named_difference("data", "abc", "xyz", {}, BEFORE) == "abc there, xyz here"
