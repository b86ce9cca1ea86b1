"""Which folder a run lives in, and what it goes on from."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import read_object
from llmtrain.record import checkpoint
from llmtrain.record.provenance import difference, digest

_WAIT_SECONDS = 60.0
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # above 0: the same start, made again


def choose_folder(output_dir: str, resume: str, identity: dict[str, Any]) -> dict[str, Any]:
    """Where this run lives and what it goes on from; makes the folder."""
    fresh: dict[str, Any] = {"checkpoint": None, "step": 0, "tokens": 0, "run_id": secrets.token_hex(4)}
    fresh["before"] = None  # the identity of a named checkpoint, which may have other settings of the update
    fresh["incarnation"] = secrets.token_hex(8)
    source = _named_checkpoint(Path(resume), identity) if resume not in ("auto", "never") else None
    restarted = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    for folder in names(output_dir):
        if is_free(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if source is not None:
                return fresh | source | {"folder": str(folder), "why": f"goes on from {source['checkpoint']}"}
            why = "new" if folder.name == Path(output_dir).resolve().name else f"new; {output_dir} is taken"
            return fresh | {"folder": str(folder), "why": why}
        previous = _unfinished(folder, identity) if resume != "never" or restarted else None
        if previous is not None and (source is None or _began_from(previous) == source["checkpoint"]):
            found = checkpoint.newest_valid(folder / "checkpoints", True, digest(identity))
            kept = {"folder": str(folder), "run_id": previous["run_id"]}
            if found is None:
                kept["why"] = "begun before, with no checkpoint yet; starts again"
                return fresh | (source or {}) | kept
            state = checkpoint.read_state(found)
            kept |= {"checkpoint": str(found), "step": state["step"], "tokens": state["tokens"]}
            return fresh | kept | {"why": f"goes on from step {state['step']}"}
    raise AssertionError("there is always a next name")


def names(output_dir: str) -> Iterator[Path]:
    base = Path(output_dir)
    if not base.name or base.name == "..":
        base = base.resolve()
    if not base.name:
        raise UserError(f"--output_dir {output_dir} cannot be a run's folder; name one inside it.")
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def is_free(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file.")
    return not folder.exists() or all(path.name.startswith((".lock", ".tmp-")) for path in folder.iterdir())


def _unfinished(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the run in ``folder``, where it can be gone on with: same identity, not finished, not running."""
    record, status = read_object(folder / "run.json"), read_object(folder / "status.json")
    if status.get("state") == "finished" or record.get("identity_sha256") != digest(identity):
        return None
    for patience in (0.0, _WAIT_SECONDS):  # a launcher that was killed leaves processes that save and then end
        try:
            with lock(folder).acquire(timeout=patience):
                return record if read_object(folder / "status.json").get("state") != "finished" else None
        except filelock.Timeout:
            if not patience:
                say("run", f"{folder} is in use; waiting {_WAIT_SECONDS:g} s for it to end before taking another name")
    return None


def _began_from(record: dict[str, Any]) -> str | None:
    return record["starts"][0]["from"] if record.get("starts") else None


def lock(folder: Path) -> filelock.FileLock:
    return filelock.FileLock(folder / ".lock")


def _named_checkpoint(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    flag_name = f"--resume_from_checkpoint {path}"
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_valid(path / "checkpoints")
        if found is None:
            raise UserError(f"{flag_name}: this run has no checkpoint yet.")
    elif (path / checkpoint.MANIFEST).exists():
        if fault := checkpoint.find_fault(path):
            raise UserError(f"{flag_name} is damaged: {fault}.")
        found = path
    else:
        raise UserError(f"{flag_name} is neither a run's folder nor a checkpoint; use auto, never or such a folder.")
    state = checkpoint.read_state(found)
    if not all(key in state for key in ("identity", "step", "tokens")):
        raise UserError(f"{flag_name}: its state.json is not one of llmtrain's.")
    for key, value in identity.items():
        before = state["identity"].get(key)
        if before != value and key not in ("update", "exchange"):
            raise UserError(f"{flag_name} has another {key}: {difference(before, value)}.")
    before, now = state["identity"].get("exchange"), identity.get("exchange")
    if before != now:
        say("changed", f"how gradients are exchanged: {before or 'exactly'} -> {now or 'exactly'}")
    return {"checkpoint": str(found), "step": state["step"], "tokens": state["tokens"], "before": state["identity"]}
