"""`make check` notices if the package grows."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launching import ROOT
from tools.size import code_lines


def test_lines_of_code_are_neither_blank_nor_prose() -> None:
    assert code_lines('"""A page.\n\nMore."""\n\n# why\nx = """a\n\nb"""\n') == 2
    assert code_lines('def f():\n    """Do it."""\n\n    return 1  # one\n') == 2


@pytest.mark.parametrize("more", [0, 1])
def test_one_line_too_many_is_an_error(more: int, tmp_path: Path) -> None:
    for folder in ("llmtrain", "recipes", "docs", "tests", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("# A page\n")
    statements = [f"x{number} = {number}\n" for number in range(100 + more)]
    (tmp_path / "llmtrain" / "a.py").write_text("".join(statements))
    shutil.copy(ROOT / "tools" / "size.py", tmp_path / "tools")
    names = tomllib.loads((ROOT / "tools" / "size.toml").read_text())
    limits = "".join(f"{name} = 100\n" for name in names)
    (tmp_path / "tools" / "size.toml").write_text(limits)

    command = [sys.executable, str(tmp_path / "tools" / "size.py")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == more
    assert ("too many: remove 1" in ended.stdout) is bool(more)
