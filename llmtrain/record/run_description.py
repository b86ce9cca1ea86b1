"""The description of a run, and what all ranks must agree on.

The *fingerprint* of a run is everything that determines its numbers, as a JSON object. A run is
resumed only by a command that has the same fingerprint.
"""

from typing import Any

from llmtrain.errors import UserError
from llmtrain.json_types import JsonObject
from llmtrain.parallel.ranks import Team
from llmtrain.record.running_code import code_digests
from llmtrain.versions import versions

# Flags that may differ between machines: paths, and what only rank 0 does.
_LOCAL_FLAGS = {
    "dataset",
    "tokenizer",
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "report_to",
}

_DETAILS = "details"  # a key of a description that is not compared
# Parts of a fingerprint that are hashes, and the keys of run.json that describe what was hashed.
_DESCRIBED_BY = {
    "data": ("dataset", "records", "train_tokens", "eval_tokens"),
    "tokenizer": ("tokenizer", "vocabulary"),
}


def difference(before: object, now: object) -> str:
    """Describe the difference between two values, for an error message.

    For two dictionaries, only the keys that differ are listed.

    Args:
        before: the value of another run or rank.
        now: the value of this one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"{before} there, {now} here"

    keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)} there, {now.get(key)} here" for key in sorted(keys))


def named_difference(
    key: str, before: object, now: object, before_record: JsonObject, now_record: JsonObject
) -> str:
    """Describe the difference between two values of a fingerprint, with names instead of hashes.

    Args:
        key: the key of the fingerprint, or ``code``.
        before: the value of another run or rank.
        now: the value of this one.
        before_record: ``run.json`` of the other one, or as much of it as describes its data.
        now_record: the same of this one.
    """
    if key == "code" and isinstance(before, dict) and isinstance(now, dict):
        files = [name for name in sorted(now) if before.get(name) != now[name]]
        return f"{', '.join(files)} has another content there"
    if key == "initial_weights":
        return _difference_of_start(before, now, before_record, now_record)
    if key not in _DESCRIBED_BY or not before_record or not now_record:
        return difference(before, now)

    name_key, *count_keys = _DESCRIBED_BY[key]
    names = [record.get(name_key) for record in (before_record, now_record)]
    before_counts = {name: before_record.get(name) for name in count_keys}
    now_counts = {name: now_record.get(name) for name in count_keys}
    counts = difference(before_counts, now_counts).replace("_", " ")
    if names[0] != names[1]:
        return ", ".join(part for part in (f"{names[0]} there, {names[1]} here", counts) if part)
    return f"{names[0]} has another content ({counts or 'of the same size'})"


def _difference_of_start(
    before: object, now: object, before_record: JsonObject, now_record: JsonObject
) -> str:
    """Describe the difference between the models that two runs start from.

    Args:
        before: the part ``initial_weights`` of the fingerprint of another run or rank.
        now: the same of this one.
        before_record: ``run.json`` of the other one.
        now_record: the same of this one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return difference(before, now)
    names = []
    for record in (before_record, now_record):
        settings = record.get("settings") or {}
        names.append((settings.get("model_name_or_path") or {}).get("value"))

    parts = []
    rest = dict(before), dict(now)
    if before.get("weights") != now.get("weights") and any(names):
        for values in rest:
            values.pop("weights", None)
        if names[0] == names[1]:
            parts.append(f"{names[0]} has other weights now")
        else:
            parts.append(f"model {names[0]} there, {names[1]} here")
    parts.append(difference(*rest))
    return ", ".join(part for part in parts if part)


def run_description(
    fingerprint: JsonObject,
    settings: dict[str, JsonObject],
    precision: str,
    details: JsonObject | None = None,
) -> JsonObject:
    """Describe what this rank is about to train, and with which code.

    Args:
        fingerprint: the fingerprint of the run.
        settings: every flag with its value and origin (:func:`llmtrain.config.flags.resolved`).
        precision: the precision as Accelerate names it, such as ``bf16``.
        details: the names and sizes of the data, for error messages. They are not compared.
    """
    flags = {
        name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS
    }
    return {
        "flags": flags,
        **fingerprint,
        "precision": precision,
        "versions": versions(),
        "code": code_digests(),
        _DETAILS: details or {},
    }


def check_ranks_agree(team: Team, description: JsonObject) -> None:
    """Check that all ranks are about to train the same.

    They may not, because each machine may have its own command, data, packages and code.

    Args:
        team: all ranks.
        description: what :func:`run_description` returns on this rank.

    Raises:
        UserError: on all ranks, if a rank is about to train something else than rank 0.
    """
    main_description, *descriptions = team.on_all(lambda: description)
    for rank, other_description in enumerate(descriptions, start=1):
        for key in main_description:
            if key == _DETAILS:
                continue
            expected, actual = _comparable(key, main_description, other_description)
            if expected != actual:
                reason = named_difference(
                    key,
                    actual,
                    expected,
                    before_record=other_description.get(_DETAILS, {}),
                    now_record=main_description[_DETAILS],
                )
                raise UserError(f"rank {rank} differs from rank 0 in {key}: {reason}.")


def _comparable(key: str, main: JsonObject, other: JsonObject) -> tuple[Any, Any]:
    """Return the values of a key that must be the same on rank 0 and on another rank."""
    expected = main[key]
    actual: Any = other.get(key)
    if key == "code":
        # A rank may import a helper module that the other ranks do not need.
        shared = expected.keys() & actual.keys()
        expected = {name: expected[name] for name in shared}
        actual = {name: actual[name] for name in shared}
    return expected, actual
