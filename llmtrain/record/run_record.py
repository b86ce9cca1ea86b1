"""``run.json``: its format, the settings and the code of a run, and what all ranks must agree on.

The *fingerprint* of a run is everything that determines its numbers, as a JSON object. A run is
resumed only by a command that has the same fingerprint.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.console import in_notebook
from llmtrain.errors import UserError
from llmtrain.files import digest, read_hashed, read_object
from llmtrain.redaction import redacted
from llmtrain.versions import versions

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmtrain.files import JsonObject
    from llmtrain.parallel.ranks import Team

# The version of run.json, state.json and MANIFEST.json. Raise it when a reader must change.
FORMAT_VERSION = 2
VERSION_KEY = "format_version"

# Flags that may differ between machines: paths, and what only rank 0 does.
_LOCAL_FLAGS = {
    "dataset",
    "tokenizer",
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "mirror",
    "report_to",
}
# Keys of a fingerprint that have hashes, and what run.json says about that which was hashed.
_DESCRIBED_BY = {
    "data": ("dataset", "records", "train_tokens", "eval_tokens"),
    "tokenizer": ("tokenizer", "vocabulary"),
}


# --- the format


def check_format(path: Path, content: JsonObject) -> None:
    """Check that the content of a file has the current format. One without a version passes.

    Raises:
        UserError: if another version of llmtrain has written the file.
    """
    version = content.get(VERSION_KEY)
    if type(version) is int and version > 0 and version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, but this llmtrain reads version "
            f"{FORMAT_VERSION}: use the version of llmtrain that has written it."
        )


def read_versioned(path: Path) -> JsonObject:
    """Return the JSON object in a file, or an empty one if the file cannot be read.

    Raises:
        UserError: if another version of llmtrain has written the file.
    """
    content = read_object(path)
    check_format(path, content)
    return content


# --- the content of run.json


def run_record(
    earlier: JsonObject | None,
    *,
    run_id: str,
    extends: JsonObject | None,
    fingerprint: JsonObject,
    fingerprint_sha256: str,
    settings: dict[str, JsonObject],
    details: JsonObject,
    start: JsonObject,
) -> JsonObject:
    """Return the new content of ``run.json``: that of the file so far, plus this start.

    Args:
        earlier: the content of the file so far; ``None`` for a new run.
        run_id: the id of the run.
        extends: the run that this one extends, if there is one.
        fingerprint: the fingerprint of the run.
        fingerprint_sha256: its digest.
        settings: every flag with its value and origin (:func:`llmtrain.config.flags.resolved`).
        details: further keys of the file, about the data.
        start: where this start begins, its processes, its device and its code.
    """
    this_start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        # How often the launcher has restarted the run (--max_restarts).
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "job": os.environ.get("SLURM_JOB_ID"),
        # The command of a notebook says nothing.
        "command": [] if in_notebook() else sys.argv,
        "directory": str(Path.cwd()),
        "host": platform.node(),
        **start,
        "git_sha": git_commit(),
    }
    earlier_starts = [] if earlier is None else earlier["starts"]
    recorded_settings = {}
    for name, setting in settings.items():
        # The name of a flag shows whether its value is a secret.
        recorded_settings[name] = {**redacted(setting), "value": redacted(setting["value"], name)}

    return {
        VERSION_KEY: FORMAT_VERSION,
        "run_id": run_id,
        "extends": extends,
        "fingerprint": fingerprint,
        "fingerprint_sha256": fingerprint_sha256,
        "processes": start["processes"],
        "settings": recorded_settings,
        **redacted(details),
        "starts": [*earlier_starts, redacted(this_start)],
    }


def start_times(record: JsonObject) -> list[str]:
    """Return the times of all starts that made the steps of a run, given its ``run.json``.

    Those of the runs that it extends come first.
    """
    extended = record.get("extends") or {}
    return [
        *extended.get("start_times", []),
        *(str(start.get("time")) for start in record.get("starts", [])),
    ]


def code_sha256() -> str:
    """Return one sha256 over the Python files of llmtrain, and the script that was started."""
    package = Path(__file__).resolve().parents[1]
    files = [*sorted(package.rglob("*.py")), Path(sys.argv[0]).resolve()]
    return digest({"files": [read_hashed(path)["sha256"] for path in files if path.is_file()]})


def git_commit() -> str | None:
    """Return the git commit of the script, or ``None`` if it is in no repository.

    The commit ends in ``-dirty`` if a tracked file has changed since then. It is ``None``, too, if
    git takes more than five seconds.
    """
    folder = str(Path(sys.argv[0]).resolve().parent)
    options = ["--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tags
    command = ["git", "-C", folder, "--no-optional-locks", "describe", *options]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


# --- what all ranks must agree on, and how runs and ranks differ


def run_description(
    fingerprint: JsonObject, settings: dict[str, JsonObject], precision: str
) -> JsonObject:
    """Describe what this rank is about to train, and with which code.

    Args:
        fingerprint: the fingerprint of the run.
        settings: every flag with its value and origin (:func:`llmtrain.config.flags.resolved`).
        precision: the precision as Accelerate names it, such as ``bf16``.
    """
    flags = {
        name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS
    }
    return {
        "flags": flags,
        **fingerprint,
        "precision": precision,
        "versions": versions(),
        "code": code_sha256(),
    }


def check_ranks_agree(team: Team, description: JsonObject, details: JsonObject) -> None:
    """Check that all ranks are about to train the same.

    They may not, because each machine may have its own command, data, packages and code.

    Args:
        team: all ranks.
        description: what :func:`run_description` returns on this rank.
        details: the names and sizes of the data, for error messages. They may differ.

    Raises:
        UserError: on all ranks, if a rank is about to train something else than rank 0.
    """
    main, *others = team.on_all(lambda: (description, details))
    for rank, other in enumerate(others, start=1):
        change = first_difference(*other, *main, places=(f"on rank {rank}", "on rank 0"))
        if change is not None:
            key, reason = change
            raise UserError(f"rank {rank} differs from rank 0 in {key}: {reason}.")


def first_difference(
    before: JsonObject,
    before_record: JsonObject,
    now: JsonObject,
    now_record: JsonObject,
    ignored: Collection[str] = (),
    places: tuple[str, str] = ("there", "here"),
) -> tuple[str, str] | None:
    """Return the first key in which two runs or ranks differ, and how; ``None`` if there is none.

    Args:
        before: the fingerprint or the description of another run or rank.
        before_record: ``run.json`` of the other one, or as much of it as describes its data.
        now: the fingerprint or the description of this one.
        now_record: the same of this one.
        ignored: keys that may differ.
        places: what a message calls the other one and this one.
    """
    for key, value in now.items():
        if key in ignored or before.get(key) == value:
            continue
        if key == "code":
            return key, "llmtrain or the recipe has another content there"
        if not before_record or not now_record:
            return key, difference(before.get(key), value, places)

        before_described = _described(key, before.get(key), before_record)
        now_described = _described(key, value, now_record)
        change = difference(before_described, now_described, places)
        if before_described == now_described:
            subject, *_ = _DESCRIBED_BY.get(key, ("weights",))
            change = f"{now_described[subject]} has another content now"
        return key, change
    return None


def _described(key: str, value: Any, record: JsonObject) -> Any:
    """Return a value of a fingerprint, with names and sizes in place of its hashes.

    Args:
        key: the key of the value.
        value: the value.
        record: the ``run.json`` that has the names and sizes.
    """
    if key in _DESCRIBED_BY:
        return {name.replace("_", " "): record.get(name) for name in _DESCRIBED_BY[key]}
    model = record.get("settings", {}).get("model_name_or_path", {}).get("value")
    if key == "initial_weights" and isinstance(value, dict) and model:
        return {**value, "weights": model}
    return value


def difference(before: object, now: object, places: tuple[str, str] = ("there", "here")) -> str:
    """Describe the difference between two values, for an error message.

    For two dictionaries, only the keys that differ are listed.

    Args:
        before: the value of another run or rank.
        now: the value of this one.
        places: what the message calls the other one and this one.
    """
    there, here = places
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"{before} {there}, {now} {here}"

    keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    return ", ".join(
        f"{key} {before.get(key)} {there}, {now.get(key)} {here}" for key in sorted(keys)
    )
