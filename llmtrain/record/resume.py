"""The folder that a run lives in, and the checkpoint that it resumes from."""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import filelock

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import read_object
from llmtrain.record import checkpoint
from llmtrain.record.format import read_versioned
from llmtrain.record.provenance import difference, digest
from llmtrain.record.resume_point import ResumePoint
from llmtrain.types import Facts

if TYPE_CHECKING:
    Held: TypeAlias = filelock.AcquireReturnProxy[filelock.BaseFileLock]

_WAIT_SECONDS = 60.0  # for an unfinished run that another process still holds
_READER_SECONDS = 1.0  # for a process that only asks whether a run is in progress
_MAY_CHANGE = ("update", "exchange", "stopping")  # if the user has named the checkpoint
_RESTART_COUNTS = (
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)  # above 0 if the launcher or Slurm has started the same command again


@contextlib.contextmanager
def choose_folder(output_dir: str, resume: str, identity: Facts) -> Iterator[ResumePoint]:
    """Choose where a run lives and what it resumes from, and hold the folder's lock.

    The lock is held until the block ends. Two starts at the same moment therefore never share a
    folder: the slower one takes the next name.

    Args:
        output_dir: the folder that the user asked for. If another run has it, the run gets the
            same name with -2, -3, ... at its end.
        resume: ``auto``, ``never``, or the folder of a run or of a checkpoint.
        identity: the identity of this run. Only a run of the same identity is resumed.

    Raises:
        UserError: what ``resume`` names cannot be resumed, no checkpoint of the run is whole, or a
            newer llmtrain has written it.
    """
    point = ResumePoint(
        folder=Path(output_dir),
        run_id=secrets.token_hex(4),
        incarnation=secrets.token_hex(8),
    )
    if resume not in ("auto", "never"):
        point = _resumed_from(point, *_named_checkpoint(Path(resume), identity))
    was_restarted = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    may_continue = resume != "never" or was_restarted

    for folder in names(output_dir):
        is_absent = not folder.exists()
        if is_free(folder):
            lock_of_new = _lock_new(folder, is_absent)
            if lock_of_new is not None:
                with lock_of_new:
                    yield point._replace(folder=folder, why=_why_new(point, folder, output_dir))
                return
        elif may_continue:
            unfinished = _lock_unfinished(folder, identity, point.checkpoint)
            if unfinished is not None:
                with unfinished.lock:
                    yield _continued(point, folder, unfinished.record, identity)
                return
    raise AssertionError("there is always a next name")


def _why_new(point: ResumePoint, folder: Path, output_dir: str) -> str:
    if point.checkpoint:
        return f"goes on from {point.checkpoint}"
    if folder != next(names(output_dir)):
        return f"new; {output_dir} is taken"
    return "new"


def _continued(point: ResumePoint, folder: Path, record: Facts, identity: Facts) -> ResumePoint:
    """Return the point of an unfinished run, with its newest checkpoint if it has one."""
    point = point._replace(folder=folder, run_id=record["run_id"])
    newest = checkpoint.newest_valid(
        folder / "checkpoints",
        set_aside=True,
        identity=digest(identity),
    )
    if newest is None:
        return point._replace(why="begun before, with no checkpoint yet; starts again")

    point = _resumed_from(point, newest)
    return point._replace(why=f"goes on from step {point.step}")


def names(output_dir: str) -> Iterator[Path]:
    """Yield the folders that a run may live in: ``output_dir``, then with -2, -3, ... at its end."""
    base = Path(output_dir)
    if not base.name or base.name == "..":
        base = base.resolve()
    if not base.name:
        raise UserError(f"--output_dir {output_dir} cannot be a run's folder; name one inside it.")

    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")


def newest_model(output_dir: str, command: str) -> str:
    """Return the model of the newest finished run in ``output_dir``, or in its name with -2, ...

    Args:
        command: the command that makes such a run, for the error.

    Raises:
        UserError: there is no finished run.
    """
    models = []
    for folder in names(output_dir):
        if is_free(folder):
            break
        if read_object(folder / "status.json").get("state") == "finished":
            models.append(folder / "model")

    if not models:
        raise UserError(
            f"no finished run in {output_dir} to go on from: first {command}, then this again; or name a model with "
            "--model_name_or_path."
        )
    newest = max(models, key=lambda folder: folder.stat().st_mtime)
    say("model", f"{newest}, the newest finished run's")
    return str(newest)


def is_free(folder: Path) -> bool:
    """Return whether a folder is absent or holds only leftovers.

    Raises:
        UserError: there is a file of this name.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file.")
    return all(path.name.startswith((".lock", ".tmp-")) for path in folder.iterdir())


def lock(folder: Path) -> filelock.FileLock:
    """Return the lock that a run holds from its start to its end."""
    return filelock.FileLock(folder / ".lock")


def _lock_new(folder: Path, is_absent: bool) -> "Held | None":
    """Lock a free folder, and make it if it is absent.

    Return ``None`` if another start has just taken it.
    """
    try:
        if is_absent:
            folder.mkdir(parents=True)  # fails for the slower start, with or without locks
        held = lock(folder).acquire(timeout=_READER_SECONDS)
    except (FileExistsError, filelock.Timeout):
        return None

    if not is_free(folder):  # another start has held the lock and ended
        held.lock.release()
        return None
    return held


class _Unfinished(NamedTuple):
    """A run that this start may continue, and its folder's lock."""

    lock: "Held"
    record: Facts  # run.json


def _lock_unfinished(folder: Path, identity: Facts, source: Path | None) -> _Unfinished | None:
    """Lock a run that this start may continue. Return ``None`` for any other run.

    The lock may be held by processes that save and end because their launcher was killed. They are
    given a minute.
    """
    if _unfinished_record(folder, identity, source) is None:
        return None
    try:
        held = lock(folder).acquire(blocking=False)
    except filelock.Timeout:
        say(
            "run",
            f"{folder} is in use; waiting {_WAIT_SECONDS:g} s for it to end before taking another "
            "name",
        )
        try:
            held = lock(folder).acquire(timeout=_WAIT_SECONDS)
        except filelock.Timeout:
            return None

    record = _unfinished_record(folder, identity, source)  # it may have finished in the meantime
    if record is None:
        held.lock.release()
        return None
    return _Unfinished(held, record)


def _unfinished_record(folder: Path, identity: Facts, source: Path | None) -> Facts | None:
    """Return ``run.json`` of an unfinished run of the same identity, or ``None`` for any other.

    Args:
        source: the checkpoint that the user has named, if any: the run must have begun from it.

    Raises:
        UserError: a newer llmtrain has written the unfinished run.
    """
    if read_object(folder / "status.json").get("state") == "finished":
        return None
    record = read_versioned(folder / "run.json")
    if record.get("identity_sha256") != digest(identity):
        return None
    if source is not None:
        origins = [start["from"] for start in record["starts"]]
        if origins[:1] != [str(source)]:
            return None
    return record


def _named_checkpoint(path: Path, identity: Facts) -> tuple[Path, Facts]:
    """Return a checkpoint that the user has named, and its identity.

    Args:
        path: the folder of a checkpoint, or of a run, whose newest checkpoint is taken.
        identity: the identity of this run. The settings of the update may differ.
    """
    flag = f"--resume_from_checkpoint {path}"
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_valid(path / "checkpoints")
        if found is None:
            raise UserError(f"{flag}: this run has no checkpoint yet.")
    elif (path / checkpoint.MANIFEST).exists():
        found = path
        fault = checkpoint.find_fault(path)
        if fault:
            raise UserError(f"{flag} is damaged: {fault}.")
    else:
        raise UserError(
            f"{flag} is neither a run's folder nor a checkpoint; use auto, never or such a folder."
        )

    before: Facts = checkpoint.read_state(found)["identity"]
    as_json = json.loads(json.dumps(identity))  # whose keys are strings, as those of a file
    for key, value in as_json.items():
        if key not in _MAY_CHANGE and before.get(key) != value:
            raise UserError(f"{flag} has another {key}: {difference(before.get(key), value)}.")
    if before.get("exchange") != identity.get("exchange"):
        exchanges = [facts.get("exchange") or "exactly" for facts in (before, identity)]
        say("changed", f"how gradients are exchanged: {exchanges[0]} -> {exchanges[1]}")
    return found, before


def _resumed_from(point: ResumePoint, path: Path, before: Facts | None = None) -> ResumePoint:
    """Return the same folder with a checkpoint to resume from."""
    state = checkpoint.read_state(path)
    return point._replace(
        checkpoint=path,
        step=state["step"],
        tokens=state["tokens"],
        before=before,
    )
