"""What to write here instead of the flags and values of other programs.

The hints are in ``flag_hints.yaml``, which is read when a name is unknown.
"""

import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from llmtrain.shipped import shipped_config

Program: TypeAlias = Literal["recipes", "commands"]


def hint_for(name: str, flags: Collection[str], program: Program = "recipes") -> str | None:
    """Return what to write instead of a name that a recipe or a command does not know.

    Args:
        name: a flag without dashes, such as ``lr``, or a flag with a value that it does not take,
            such as ``optim=adam``.
        flags: the known flags, such as ``--max_steps``. A hint counts only if they include all
            flags that it names.
        program: whether a recipe or a command of ``llmtrain`` was started.
    """
    for hint in hints(program).get(name, []):
        if flags_in(hint).issubset(flags):
            return re.sub(r"accelerate_configs/(\w+)\.yaml", _shipped_path, hint)
    return None


@functools.cache
def hints(program: Program) -> dict[str, list[str]]:
    """Return the hints for each name; the first counts whose flags are known."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    hints_of_name: dict[str, list[str]] = {}
    for names, texts in yaml.safe_load(text)[program].items():
        for name in names.split(", "):
            assert name not in hints_of_name, name
            hints_of_name[name] = [texts] if isinstance(texts, str) else texts
    return hints_of_name


def flags_in(hint: str) -> set[str]:
    """Return the flags of the recipe in a hint, and not those of ``accelerate launch``."""
    own_words = re.sub(r"accelerate launch .* RECIPE", "", hint)
    return set(re.findall(r"--\w+", own_words))


def _shipped_path(match: re.Match[str]) -> str:
    return str(shipped_config(match[1]))
