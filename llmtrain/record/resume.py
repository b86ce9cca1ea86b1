"""Choose the folder that a run lives in, and the checkpoint that it resumes from."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import digest, json_text, names_in, read_object
from llmtrain.json_types import JsonObject
from llmtrain.locks import file_lock
from llmtrain.record import checkpoint
from llmtrain.record.history import History, candidate_folders, is_free
from llmtrain.record.run_record import (
    check_resumable,
    difference,
    first_difference,
    read_versioned,
)

_WAIT_SECONDS = 60.0  # for an unfinished run whose lock another process still holds
_READER_SECONDS = 1.0  # for a process that only checks whether a run is in progress
# Keys of the fingerprint that may differ from those of a checkpoint that the user has named. The
# changes of some are told here; other lines tell how the optimizer has changed.
_TOLD_KEYS = ("random", "gradient_exchange", "callbacks", "metrics", "own_settings")
MAY_CHANGE = (*_TOLD_KEYS, "optimizer", "learning_rates", "early_stopping")
# Above 0 if the launcher or Slurm has started the same command again.
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class ResumePoint(NamedTuple):
    """The folder of a run, and the checkpoint that it resumes from, if there is one."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # steps made until the checkpoint
    tokens: int = 0  # target tokens of those steps
    run_id: str = ""
    start_id: str = ""  # distinguishes the starts in one folder
    reason: str = ""  # the reason for this start, for the start-up log
    earlier_record: JsonObject | None = None  # run.json of the unfinished run; None for a new run
    named_fingerprint: JsonObject | None = None  # of the checkpoint that the user has named
    damaged_checkpoints: tuple[str, ...] = ()  # the run starts again, because none is intact
    follows_failure: bool = False  # whether the last start of the run failed or was killed
    recompute_every: int | None = None  # as the run that made the checkpoint has recorded it

    @property
    def extended_run(self) -> Path | None:
        """The folder of the run that this run extends: another one, which made the checkpoint."""
        if self.checkpoint is None:
            return None
        folder = self.checkpoint.parent.parent
        is_own = folder.absolute() == self.folder.absolute()
        return None if is_own or not (folder / "run.json").exists() else folder

    def extends(self) -> JsonObject | None:
        """Return what ``run.json`` says about the run that this run extends."""
        extends: JsonObject | None = (self.earlier_record or {}).get("extends")
        if self.extended_run is None or extends is not None:
            return extends
        extended = History.read(self.extended_run)
        return {
            "run": str(self.extended_run),
            "run_id": extended.record.get("run_id"),
            "step": self.step,  # the last one that is taken over
            "start_times": extended.all_start_times(),
        }


@contextlib.contextmanager
def choose_folder(
    output_dir: str,
    resume: str,
    fingerprint: JsonObject,
    record: JsonObject | None = None,
    run_id: str | None = None,
) -> Iterator[ResumePoint]:
    """Choose where a run lives and what it resumes from, and hold the folder's lock.

    The lock is held until the block ends. Two starts at the same moment therefore never share a
    folder: the slower one takes the next name.

    Args:
        output_dir: the folder that the user asked for. If another run has it, the run gets the
            same name with -2, -3, ... at its end.
        resume: ``auto``, ``never``, or the folder of a run or of a checkpoint.
        fingerprint: the fingerprint of this run. Only a run of the same fingerprint is resumed.
        record: what ``run.json`` will say about the data and the settings, for error messages.
        run_id: the id of the run, if a sweep has chosen it. Only a run of this id is resumed.

    Raises:
        UserError: if the checkpoint that ``resume`` names cannot be used, if no checkpoint of the
            run is intact, or if another version of llmtrain has written it. A restart by Slurm or a
            launcher begins such a run again, once. Also if the disk fails for several seconds,
            which is no damage: nothing is renamed then.
    """
    record = record or {}
    fingerprint_sha256 = digest(fingerprint)
    # As it is read from a file: numbers as keys are strings, and tuples are lists.
    fingerprint = json.loads(json_text(fingerprint))
    is_restart = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    named = None
    if resume not in ("auto", "never"):
        named = _named_checkpoint(Path(resume), fingerprint, record)

    def usable(folder: Path) -> JsonObject | None:
        """Return ``run.json`` of a run to continue; empty for a free folder, ``None`` if taken."""
        if is_free(folder):
            return {}
        if (resume == "never" and not is_restart) or _is_finished(folder):
            return None
        unfinished = read_versioned(folder / "run.json")
        if run_id is not None and unfinished.get("run_id") != run_id:
            return None
        if resume == "auto":
            check_resumable(folder / "run.json")
        if unfinished.get("fingerprint_sha256") != fingerprint_sha256:
            return None
        origins = [start["from"] for start in unfinished["starts"][:1]]
        return unfinished if named is None or origins == [str(named)] else None

    with contextlib.ExitStack() as lock:
        folder, earlier_record = _lock_folder(lock, output_dir, usable)
        point = ResumePoint(
            folder=folder,
            run_id=run_id or secrets.token_hex(4),
            start_id=secrets.token_hex(8),
        )
        if earlier_record:
            yield _continued(point, earlier_record, named, fingerprint_sha256, is_restart)
        elif named:
            point = _resumed_from(point, named, is_named=True)
            yield point._replace(reason=f"resumes from {named}")
        else:
            wanted = next(candidate_folders(output_dir))
            yield point._replace(reason=_reason_for_new(folder, wanted, fingerprint, record))


def _is_finished(folder: Path) -> bool:
    return read_object(folder / "status.json").get("state") == "finished"


def _lock_folder(
    lock: contextlib.ExitStack, output_dir: str, usable: Callable[[Path], JsonObject | None]
) -> tuple[Path, JsonObject]:
    """Make ``lock`` hold the lock of the first usable folder, which is made if it is absent.

    Args:
        lock: gets the lock.
        output_dir: the folder that the user asked for.
        usable: returns ``run.json`` of a run to continue; empty for a free folder, ``None`` for a
            folder that is taken.

    Returns:
        The folder, and what ``usable`` has returned for it.

    Raises:
        UserError: if the folder cannot be made or locked.
    """
    for folder in candidate_folders(output_dir):
        is_absent = names_in(folder) is None
        record = usable(folder)
        if record is None:
            continue
        try:
            if is_absent:
                # This fails for the slower one of two starts, even without locks.
                folder.mkdir(parents=True)
            _wait_for_lock(lock, folder, is_run=record != {})
        except (FileExistsError, BlockingIOError):
            continue
        except OSError as error:
            raise UserError(
                f"--output_dir {folder} cannot be used: {error.strerror or first_line(error)}; "
                "name a folder in which you may write, or start again when its disk answers."
            ) from None

        # Another start may have used the folder, or finished the run, in the meantime.
        record = usable(folder)
        if record is not None:
            return folder, record
        lock.close()
    raise AssertionError("there is always another candidate")


def _wait_for_lock(lock: contextlib.ExitStack, folder: Path, is_run: bool) -> None:
    """Make ``lock`` hold the lock of a folder.

    Processes whose launcher was killed may still hold the lock of a run, to save and end. They get
    a minute.

    Raises:
        BlockingIOError: if another start has the folder.
    """
    try:
        lock.enter_context(file_lock(folder / ".lock", _READER_SECONDS))
    except BlockingIOError:
        if not is_run:
            raise
        say(
            "run",
            f"{folder} is in use; waiting up to {_WAIT_SECONDS:g} s for that run to end before "
            "using another folder",
        )
        lock.enter_context(file_lock(folder / ".lock", _WAIT_SECONDS))


def _continued(
    point: ResumePoint,
    earlier_record: JsonObject,
    named: Path | None,
    fingerprint_sha256: str,
    is_restart: bool,
) -> ResumePoint:
    """Return where an unfinished run continues: at its newest checkpoint, if it has one.

    Args:
        point: has the folder of the unfinished run.
        earlier_record: ``run.json`` of the unfinished run.
        named: the checkpoint that the user has named, if any. The run has begun there.
        fingerprint_sha256: the hash of the fingerprint of this run.
        is_restart: whether Slurm or the launcher has restarted this command. Then nobody reads an
            error, so a run that has no intact checkpoint begins again. If it happens a second time,
            the disk is at fault, and the run ends.

    Raises:
        UserError: if the run has checkpoints, and none is intact.
    """
    state = read_object(point.folder / "status.json").get("state")
    point = point._replace(
        run_id=earlier_record["run_id"],
        earlier_record=earlier_record,
        follows_failure=state != "preempted",
    )
    earlier_damage: list[str] = []
    for start in earlier_record["starts"]:
        earlier_damage += start.get("lost_checkpoints", [])
    reason = "unfinished, without a checkpoint yet; starts again"
    try:
        newest = checkpoint.newest_valid(
            point.folder / "checkpoints",
            set_aside=True,
            fingerprint=fingerprint_sha256,
            earlier_damage=earlier_damage,
        )
    except checkpoint.AllDamagedError as error:
        if not is_restart or earlier_damage:
            raise
        newest = None
        reason = "restarted, without an intact checkpoint; starts again"
        point = point._replace(damaged_checkpoints=tuple(error.checkpoints))

    if newest is not None:
        point = _resumed_from(point, newest, is_named=False)
        return point._replace(reason=f"resumes from step {point.step}")
    if named is not None:
        point = _resumed_from(point, named, is_named=True)
    return point._replace(reason=reason)


def _resumed_from(point: ResumePoint, path: Path, is_named: bool) -> ResumePoint:
    """Return a resume point with a checkpoint that the user has named, or that the run has made."""
    state = checkpoint.read_state(path)
    starts = History.read(path.parent.parent).starts
    recorded = [start.get("recompute_every") for start in starts]
    known = [every for every in recorded if every is not None]
    return point._replace(
        checkpoint=path,
        step=state["step"],
        tokens=state["tokens"],
        named_fingerprint=state["fingerprint"] if is_named else None,
        recompute_every=known[-1] if known else None,
    )


def _reason_for_new(folder: Path, wanted: Path, fingerprint: JsonObject, record: JsonObject) -> str:
    """Return why a run begins in a new folder, for the start-up log.

    Args:
        folder: the new folder.
        wanted: the folder that the user asked for.
        fingerprint: the fingerprint of this run.
        record: what ``run.json`` will say about the data and the settings.
    """
    if folder == wanted:
        return "new"
    reason = f"new; {wanted} is taken"
    taken_record = read_object(wanted / "run.json")
    taken_fingerprint = taken_record.get("fingerprint")
    if _is_finished(wanted) or not isinstance(taken_fingerprint, dict):
        return reason
    change = first_difference(taken_fingerprint, taken_record, fingerprint, record)
    if change is None:
        return reason
    key, difference_text = change
    return f"{reason} by a run that differs in {key.replace('_', ' ')}: {difference_text}"


def _named_checkpoint(path: Path, fingerprint: JsonObject, record: JsonObject) -> Path:
    """Return a checkpoint that the user has named.

    Args:
        path: the folder of a checkpoint, or of a run, whose newest checkpoint is used.
        fingerprint: the fingerprint of this run. It must be that of the checkpoint, except for a
            few keys such as the optimizer settings.
        record: what ``run.json`` will say about the data and the settings, for error messages.

    Raises:
        UserError: if there is no such checkpoint, if it is damaged, or if it has another
            fingerprint.
    """
    flag = f"--resume_from_checkpoint {path}"
    if (path / "checkpoints").is_dir():
        named = checkpoint.newest_valid(path / "checkpoints")
        if named is None:
            raise UserError(f"{flag}: this run has no checkpoint yet.")
    elif (path / checkpoint.MANIFEST).exists():
        named = path
        check_resumable(path / checkpoint.MANIFEST)
        fault = checkpoint.find_fault(path)
        if fault:
            raise UserError(f"{flag} is damaged: {fault}.")
    else:
        raise UserError(
            f"{flag} is neither a run folder nor a checkpoint; use auto, never or such a folder."
        )

    named_fingerprint: JsonObject = checkpoint.read_state(named)["fingerprint"]
    named_record = read_object(named.parent.parent / "run.json")
    change = first_difference(named_fingerprint, named_record, fingerprint, record, MAY_CHANGE)
    if change is not None:
        key, difference_text = change
        words = key.replace("_", " ")
        remedy = "leave out --resume_from_checkpoint to start a new run"
        if key == "data":
            remedy = (
                f"start a new run from its model: recipes/finetune.py --model_name_or_path {path}"
            )
        raise UserError(
            f"{flag} differs in {words}: {difference_text}; resume with the same {words}, or "
            f"{remedy}."
        )
    for key in _TOLD_KEYS:
        before = named_fingerprint.get(key)
        now = fingerprint.get(key)
        if before != now:
            say("changed", f"{key.replace('_', ' ')}: {difference(before, now)}")
    return named
