"""The replacement for a name that is not known: a hint, or the nearest known name.

The hints, for users of other programs, are in ``hints.yaml``. It is read when a name is unknown.
"""

import difflib
import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

Program: TypeAlias = Literal["recipes", "commands"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " - did you mean X?" with the nearest known name, or nothing if none is near.

    Names are compared without the dashes in front of them, which all flags have in common. If a
    word is the beginning of one name only, that name is meant.
    """
    full_names = {_plain(name): name for name in known}
    typed = _plain(word)
    near = [name for name in full_names if name.startswith(typed)]
    if len(near) != 1:
        near = difflib.get_close_matches(typed, list(full_names), n=1, cutoff=0.7)
    if not near:
        return ""

    # A misspelling may lack many letters of a name, but has few others: teacher_model_name_or_path
    # is another flag than model_name_or_path.
    blocks = difflib.SequenceMatcher(None, near[0], typed).get_matching_blocks()
    other_letters = len(typed) - sum(block.size for block in blocks)
    if other_letters > max(1, len(typed) / 6):
        return ""
    return f" - did you mean {full_names[near[0]]}?"


def hint_for(name: str, flags: Collection[str], program: Program = "recipes") -> str:
    """Return the hint for a name that a recipe or a command does not know, or nothing.

    Args:
        name: a flag, such as ``--lr``, or a flag with a value that it does not take, such as
            ``optim=adam``.
        flags: the known flags, such as ``--max_steps``. A hint counts only if they include all
            flags that it names.
        program: whether a recipe or a command of ``llmtrain`` was started.
    """
    hint = hints(program).get(_plain(name), "")
    own_words = re.sub(r"accelerate launch .* RECIPE|lm_eval .*", "", hint)
    return hint if set(re.findall(r"--\w+", own_words)).issubset(flags) else ""


@functools.cache
def hints(program: Program) -> dict[str, str]:
    """Return the hint for each name."""
    import yaml  # which only a mistake needs

    text = Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8")
    hint_of_name: dict[str, str] = {}
    for names, hint in yaml.safe_load(text)[program].items():
        hint_of_name |= dict.fromkeys(names.split(", "), hint)
    return hint_of_name


def _plain(name: str) -> str:
    """Return a name without dashes, such as ``max_steps`` for ``--max-steps``."""
    return name.lstrip("-").replace("-", "_")
