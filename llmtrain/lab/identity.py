"""Whether settings make another run, and whether two runs may differ in their last bits.

Both follow from what each flag affects, which ``run.json`` records (see :func:`llmtrain.flag`), and
from :data:`METADATA`, which says the same about the rest of a run's record.
"""

import re

from llmtrain.files import Json, JsonObject
from llmtrain.record.history import History
from llmtrain.record.tolerances import (
    NO_TOLERANCE,
    Tolerance,
    relative_difference,
    tolerance_of,
    widest,
)

# Keys of a run's record, or of its first start: what they affect, and their name in messages.
METADATA = {
    "data_sha256": ("data", "content of the data"),
    "tokenizer_sha256": ("data", "tokenizer"),
    "train_rows": ("data", "train rows"),
    "vocabulary": ("model", "vocabulary size"),
    "mixed_precision": ("pass", "precision"),
    "git_sha": ("code", "commit"),
    "code_sha256": ("code", "code of llmtrain and the recipe"),
    "versions": ("code", "versions"),
    "processes": ("layout", "processes"),
    "sharded": ("layout", "sharded"),
    "threads": ("layout", "threads"),
    "device": ("layout", "device"),
    "host": ("layout", "host"),
}

# Besides the layout, these keys of a start change the last bits.
_OTHER_KEYS_OF_BITS = ("mixed_precision", "versions")


def effects_between(run_a: History, run_b: History) -> dict[str, set[str]]:
    """Return what each setting of two runs affects, according to either of them."""
    effects: dict[str, set[str]] = {}
    for run in (run_a, run_b):
        for name, parts in run.effects.items():
            effects.setdefault(name, set()).update(parts)
    return effects


def compared_settings(run: History) -> JsonObject:
    """Return the settings of a run that make it another run, apart from the seed.

    Settings that change no numbers are left out, such as the names of folders and trackers, and so
    are those of the layout, which change no more than rounding errors.
    """
    left_out = {"seed", "nowhere", "layout"}
    return {
        name: value
        for name, value in run.settings.items()
        if not left_out.issuperset(run.effects.get(name, ["any"]))
    }


def may_bits_differ(run_a: History, run_b: History) -> bool:
    """Return whether the last bits of two runs with the same settings and code may differ.

    They are the same if both runs were computed in the same way: with the same settings of the
    layout, the same processes and threads, and so on, from their first start to their last. On a
    GPU that also takes ``--bitwise``, with which the number of processes does not matter.
    """
    if not run_a.starts or not run_b.starts:
        return True

    for name, parts in effects_between(run_a, run_b).items():
        if "layout" in parts and run_a.settings.get(name) != run_b.settings.get(name):
            return True

    starts = [*run_a.starts, *run_b.starts]
    is_bitwise = bool(run_a.settings.get("bitwise"))
    if not is_bitwise and starts[0].get("device") != "cpu":
        return True

    keys = [key for key, (group, _) in METADATA.items() if group == "layout"]
    if is_bitwise:
        keys.remove("processes")
    return any(
        start.get(key) != starts[0].get(key)
        for start in starts
        for key in (*keys, *_OTHER_KEYS_OF_BITS)
    )


def tolerance_between(run_a: History, run_b: History) -> Tolerance:
    """Return the tolerance for the lowest precision of all starts of two runs.

    It is :data:`NO_TOLERANCE` if the bits must be equal.
    """
    if not may_bits_differ(run_a, run_b):
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


def flat_record(run: History) -> JsonObject:
    """Return the run's record and its first start as one object."""
    start = run.starts[0] if run.starts else {}
    return {**start, **run.record, "processes": start.get("processes")}


def shorten_hash(value: Json) -> str:
    """Return a value as text, and a hash by its first digits and the mark of a dirty commit."""
    text = str(value)
    match = re.fullmatch(r"([0-9a-f]{40}|[0-9a-f]{64})(-dirty|-unknown)?", text)
    if match is None:
        return text
    return f"{text[:12]}...{match[2] or ''}"
