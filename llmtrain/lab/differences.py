"""What differs between runs: one list, which all commands of the lab print.

``run.json`` records what each setting affects (see :func:`llmtrain.flag`). :data:`_RECORDED` says
the same about the rest of a run's record.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.files import Json
from llmtrain.record.history import History
from llmtrain.record.tolerances import (
    NO_TOLERANCE,
    Tolerance,
    relative_difference,
    tolerance_of,
    widest,
)

# Keys of a run's record, or of its first start: their name in messages, and what they affect.
_RECORDED = {
    "data_sha256": ("content of the data", "data"),
    "tokenizer_sha256": ("tokenizer", "data"),
    "train_rows": ("train rows", "data"),
    "vocabulary": ("vocabulary size", "data"),
    "mixed_precision": ("precision", "numbers"),
    "git_sha": ("commit", "numbers"),
    "code_sha256": ("code of llmtrain and the recipe", "numbers"),
    "processes": ("processes", "nothing"),
    "sharded": ("sharded", "nothing"),
    "threads": ("threads", "nothing"),
    "device": ("device", "nothing"),
    "host": ("host", "nothing"),
}


class Fact(NamedTuple):
    """A setting of a run, or something else that its record has.

    Attributes:
        value: the value.
        affects: ``data``, ``numbers`` or ``nothing``; see :func:`llmtrain.flag`.
        is_code: whether it says which code was run.
    """

    value: Json
    affects: str
    is_code: bool = False


class Difference(NamedTuple):
    """A fact whose value is not the same in all runs.

    Attributes:
        name: the name of a flag, such as ``--seed``, or of something else, such as ``commit``.
        values: its value in each run; ``None`` if a run has not recorded it.
        affects: what it affects, as in :class:`Fact`.
        is_code: whether it says which code was run.
    """

    name: str
    values: list[Json]
    affects: str
    is_code: bool = False

    def __str__(self) -> str:
        return f"{self.name} {' and '.join(shorten_hash(value) for value in self.values)}"


def facts_of(run: History) -> dict[str, Fact]:
    """Return what may differ between a run and others, by name.

    Settings that affect nothing are left out: names of folders, or how a step is divided.
    """
    facts = {}
    for name, value in run.settings.items():
        if run.affects(name) != "nothing":
            facts[f"--{name}"] = Fact(value, run.affects(name))

    start = run.starts[0] if run.starts else {}
    # The record also has the processes of the latest start.
    record = {**run.record, **start}
    for key, (name, affects) in _RECORDED.items():
        if key in record:
            facts[name] = Fact(record[key], affects, is_code=key in ("git_sha", "code_sha256"))
    for package, version in (record.get("versions") or {}).items():
        facts[f"version of {package}"] = Fact(version, "numbers", is_code=True)
    return facts


def differences(runs: Sequence[History]) -> list[Difference]:
    """Return what is not the same in all runs, in the order of their records."""
    facts_by_run = [facts_of(run) for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(facts_by_run))
    differing = []
    for name in names:
        facts = [facts[name] for facts in facts_by_run if name in facts]
        values = [facts[name].value if name in facts else None for facts in facts_by_run]
        # A key that other versions of the package do not record says nothing.
        is_known = name.startswith("--") or len(facts) == len(runs)
        if is_known and any(value != values[0] for value in values):
            differing.append(Difference(name, values, facts[0].affects, facts[0].is_code))
    return differing


def tolerance_between(run_a: History, run_b: History) -> Tolerance:
    """Return by how much two runs may differ: by nothing with ``--bitwise``, else by rounding.

    Their micro-batches must have the same size. The lowest precision of all their starts counts.
    """
    starts = [*run_a.starts, *run_b.starts]
    are_bitwise = run_a.settings.get("bitwise") and run_b.settings.get("bitwise")
    rows_a = run_a.settings.get("per_device_train_batch_size")
    rows_b = run_b.settings.get("per_device_train_batch_size")
    if are_bitwise and rows_a == rows_b and starts:
        keys = ("threads", "device", "host", "mixed_precision", "versions")
        if all(start.get(key) == starts[0].get(key) for start in starts for key in keys):
            return NO_TOLERANCE

    tolerances = []
    for run in (run_a, run_b):
        precisions = [str(start.get("mixed_precision", "no")) for start in run.starts] or ["no"]
        tolerances += [tolerance_of(precision, run.settings) for precision in precisions]
    return widest(tolerances)


def have_same_eval_loss(run_a: History, run_b: History) -> bool:
    """Return whether the last eval losses of two runs are the same, except for rounding."""
    difference = relative_difference(run_a.latest("eval/loss"), run_b.latest("eval/loss"))
    return difference <= tolerance_between(run_a, run_b).loss


def shorten_hash(value: Json) -> str:
    """Return a value as text, and a hash by its first digits and the mark of a dirty commit."""
    text = str(value)
    match = re.fullmatch(r"([0-9a-f]{40}|[0-9a-f]{64})(-dirty|-unknown)?", text)
    if match is None:
        return text
    return f"{text[:12]}...{match[2] or ''}"
