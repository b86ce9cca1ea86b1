"""What differs between runs: one list, which all commands of the lab print.

``run.json`` records what each setting affects (see :func:`llmtrain.flag`). :data:`_RECORDED` says
the same about the rest of a run's record.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.files import Json, JsonObject
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
    # The flag may be auto. A start has the precision that it chose.
    "mixed_precision": ("--mixed_precision", "numbers"),
    "git_sha": ("commit", "numbers"),
    "code_sha256": ("code of llmtrain and the recipe", "numbers"),
    "processes": ("processes", "nothing"),
    "sharded": ("sharded", "nothing"),
    "threads": ("threads", "nothing"),
    "device": ("device", "nothing"),
    "host": ("host", "nothing"),
}


class Difference(NamedTuple):
    """A setting of runs, or something else that they have recorded, that is not the same in all.

    Attributes:
        name: the name of a flag, such as ``--seed``, or of something else, such as ``commit``.
        values: its value in each run; ``None`` if a run has not recorded it.
        affects: ``data``, ``numbers`` or ``nothing``; see :func:`llmtrain.flag`.
    """

    name: str
    values: list[Json]
    affects: str

    def __str__(self) -> str:
        return f"{self.name} {' and '.join(shorten_hash(value) for value in self.values)}"

    @property
    def is_code(self) -> bool:
        """Whether it says which code was run."""
        return self.name.startswith(("commit", "code of", "version of"))


def differences(runs: Sequence[History]) -> list[Difference]:
    """Return what is not the same in all runs, in the order of their records.

    Settings that affect nothing are left out: names of folders, or how a step is divided.
    """
    affects: dict[str, str] = {}
    values_by_run = []
    for run in runs:
        values = {f"--{name}": value for name, value in run.settings.items()}
        for name in run.settings:
            affects.setdefault(f"--{name}", run.affects(name))

        # The record also has the processes of the latest start.
        record = {**run.record, **(run.starts[0] if run.starts else {})}
        for key, (name, affected) in _RECORDED.items():
            if key in record:
                values[name] = record[key]
                affects[name] = affected
        for package, version in (record.get("versions") or {}).items():
            values[f"version of {package}"] = version
            affects[f"version of {package}"] = "numbers"
        values_by_run.append(values)

    differing = []
    for name, affected in affects.items():
        is_flag = name.startswith("--")
        if is_flag and affected == "nothing":
            continue
        values_of_runs = [values.get(name) for values in values_by_run]
        # A run of another version of the package may lack a key, which says nothing.
        compared = [values[name] for values in values_by_run if name in values]
        if is_flag:
            compared = values_of_runs
        if any(value != compared[0] for value in compared):
            differing.append(Difference(name, values_of_runs, affected))
    return differing


def eval_measure(run: History) -> JsonObject:
    """Return what the eval loss of a run measures, by name. Only equal measures can be compared."""
    fingerprint = run.record.get("fingerprint") or {}
    objective = dict(fingerprint.get("objective") or {})
    # The training rows decide how many answers a row has, too.
    objective.pop("answers_per_row", None)
    if objective.pop("reference_size", 0):
        objective["reference"] = (fingerprint["initial_weights"] or {}).get("weights")
    return {
        "eval rows": run.record.get("eval_sha256"),
        "lengths of a row": run.record.get("block_size"),
        "loss functions": objective,
    }


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
