"""The replacement for a name that is not known: a hint, or the nearest known name.

The hints, for users of other programs, are in ``hints.yaml``. It is read when a name is unknown.
"""

import difflib
import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from llmtrain.shipped import shipped_config

Program: TypeAlias = Literal["recipes", "commands"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " - did you mean X?" with the nearest known name, or nothing if none is near.

    Names are compared without the dashes in front of them, which all flags have in common. If a
    word is the beginning of one name only, that name is meant.
    """
    full_names = {name.lstrip("-").replace("-", "_"): name for name in known}
    typed = word.lstrip("-").replace("-", "_")
    near = [name for name in full_names if name.startswith(typed)]
    if len(near) != 1:
        near = difflib.get_close_matches(typed, list(full_names), n=1)
    return f" - did you mean {full_names[near[0]]}?" if near else ""


def hint_for(name: str, flags: Collection[str], program: Program = "recipes") -> str | None:
    """Return a hint for a name that a recipe or a command does not know.

    Args:
        name: a flag without dashes, such as ``lr``, or a flag with a value that it does not take,
            such as ``optim=adam``.
        flags: the known flags, such as ``--max_steps``. A hint counts only if they include all
            flags that it names.
        program: whether a recipe or a command of ``llmtrain`` was started.
    """
    for hint in hints(program).get(name, []):
        if flags_in(hint).issubset(flags):
            return re.sub(r"<(\w+)\.yaml>", _shipped_path, hint)
    return None


@functools.cache
def hints(program: Program) -> dict[str, list[str]]:
    """Return the hints for each name; the first counts whose flags are known."""
    import yaml  # which only a mistake needs

    text = Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8")
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
