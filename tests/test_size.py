"""`make check` notices if the package grows, and code that moves to another place wins nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launching import ROOT
from tools.size import code_lines, measure

STATEMENTS = "".join(f"x{number} = {number}\n" for number in range(100))
TABLE = "TABLE = {\n" + "".join(f"    'name{number}': {number},\n" for number in range(40)) + "}\n"
HELPER = "def _triple(x):\n    return 3 * x\n\n\nprint(_triple(1))\n"


def write_tree(root: Path, **modules: str) -> Path:
    """Write a package of these modules, with what else is counted."""
    for folder in ("llmtrain", "recipes", "docs", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "README.md").write_text("# A page about double\n")
    for name, source in modules.items():
        (root / "llmtrain" / f"{name}.py").write_text(source)
    return root


def changes(before: dict[str, int], after: dict[str, int]) -> tuple[set[str], set[str]]:
    """Return which numbers are lower, and which are higher."""
    lower = {name for name in before if after[name] < before[name]}
    higher = {name for name in before if after[name] > before[name]}
    return lower, higher


def test_lines_of_code_are_neither_blank_nor_prose() -> None:
    assert code_lines('"""A page.\n\nMore."""\n\n# why\nx = """a\n\nb"""\n') == 2
    assert code_lines('def f():\n    """Do it."""\n\n    return 1  # one\n') == 2


def test_a_table_that_moves_into_a_packaged_file_is_counted_there(tmp_path: Path) -> None:
    before = measure(write_tree(tmp_path / "before", a=STATEMENTS + TABLE))
    tree = write_tree(tmp_path / "after", a=STATEMENTS + "TABLE = load()\n")
    (tree / "llmtrain" / "table.yaml").write_text("name: 1\n" * 40)

    lower, higher = changes(before, measure(tree))
    assert lower == {"lines"}
    assert higher == {"lines_of_data"}


def test_a_helper_that_loses_its_underscore_is_counted_as_before(tmp_path: Path) -> None:
    before = measure(write_tree(tmp_path / "before", a=HELPER))
    after = measure(write_tree(tmp_path / "after", a=HELPER.replace("_triple", "triple")))

    assert changes(before, after) == ({"private_helpers_used_once"}, set())
    assert before["functions_used_once"] == after["functions_used_once"] == 1
    # A function that a page documents is one that users call.
    public = HELPER.replace("_triple", "double")
    assert measure(write_tree(tmp_path / "public", a=public))["functions_used_once"] == 0


def test_two_modules_that_become_one_are_counted_by_their_length(tmp_path: Path) -> None:
    before = measure(write_tree(tmp_path / "before", a=STATEMENTS, b=STATEMENTS))
    after = measure(write_tree(tmp_path / "after", a=STATEMENTS * 2))

    lower, higher = changes(before, after)
    assert lower == {"modules"}
    assert higher == {"lines_beyond_150_of_a_module"}


@pytest.mark.parametrize("more", [0, 1])
def test_one_line_too_many_is_an_error(more: int, tmp_path: Path) -> None:
    tree = write_tree(tmp_path, a=STATEMENTS + "y = 1\n" * more)
    (tree / "tools").mkdir()
    (tree / "tools" / "size.py").write_text((ROOT / "tools" / "size.py").read_text())
    limits = dict.fromkeys(tomllib.loads((ROOT / "tools" / "size.toml").read_text()), 100)
    lines = "".join(f"{name} = {limit}\n" for name, limit in limits.items())
    (tree / "tools" / "size.toml").write_text(lines)

    command = [sys.executable, str(tree / "tools" / "size.py")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == more
    assert ("too many: remove 1" in ended.stdout) is bool(more)
