"""Choose the folder that a run lives in, and the checkpoint that it resumes from."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import digest, json_text, names_in, read_object
from llmtrain.json_types import JsonObject
from llmtrain.locks import file_lock
from llmtrain.record import checkpoint
from llmtrain.record.format import check_resumable, read_versioned
from llmtrain.record.history import History, candidate_folders, is_free
from llmtrain.record.run_description import difference, named_difference

_WAIT_SECONDS = 60.0  # for an unfinished run whose lock another process still holds
_READER_SECONDS = 1.0  # for a process that only checks whether a run is in progress
# Keys of the fingerprint that may differ from those of a checkpoint that the user has named.
MAY_CHANGE = (
    "random",
    "optimizer",
    "learning_rates",
    "gradient_exchange",
    "early_stopping",
    "callbacks",
    "metrics",
    "own_settings",
)
# Keys whose change is only told; another line tells how the optimizer has changed.
_TOLD_KEYS = ("random", "gradient_exchange", "callbacks", "metrics", "own_settings")
# Keys that take no article in a sentence.
_PLURAL_KEYS = (
    "data",
    "initial_weights",
    "learning_rates",
    "callbacks",
    "metrics",
    "own_settings",
)
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
    named_fingerprint: JsonObject | None = None  # of the checkpoint that the user has named
    lost_checkpoints: tuple[str, ...] = ()  # damaged ones, if the run starts again for them
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
            run is intact, or if a newer llmtrain has written it. A restart by Slurm or a launcher
            begins such a run again, once. Also if the disk fails for several seconds, which is no
            damage: nothing is renamed then.
    """
    point = ResumePoint(
        folder=next(candidate_folders(output_dir)),
        run_id=run_id or secrets.token_hex(4),
        start_id=secrets.token_hex(8),
    )
    if resume not in ("auto", "never"):
        named_checkpoint, named_fingerprint = _named_checkpoint(
            Path(resume), fingerprint, record or {}
        )
        point = _resumed_from(point, named_checkpoint, named_fingerprint)
    was_restarted = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    may_continue = resume != "never" or was_restarted

    def usable_record(folder: Path) -> JsonObject | None:
        """Return ``run.json`` of a run to continue; empty for a free folder, ``None`` if taken."""
        if is_free(folder):
            return {}
        if not may_continue:
            return None
        if resume == "auto" and not _is_finished(folder):
            check_resumable(folder / "run.json")
        return _unfinished_record(folder, fingerprint, point.checkpoint, run_id)

    with contextlib.ExitStack() as lock:
        for folder in candidate_folders(output_dir):
            is_absent = names_in(folder) is None
            found_record = usable_record(folder)
            if found_record is None:
                continue
            if _lock_folder(lock, folder, is_absent, is_run=found_record != {}):
                # Another start may have used the folder, or finished the run, in the meantime.
                found_record = usable_record(folder)
                if found_record is not None:
                    break
                lock.close()

        if found_record:
            point = point._replace(folder=folder)
            point = _continued(point, found_record, fingerprint, was_restarted=was_restarted)
        else:
            reason = _reason_for_new(point, folder, fingerprint=fingerprint, record=record or {})
            point = point._replace(folder=folder, reason=reason)
        yield point


def _reason_for_new(
    point: ResumePoint, folder: Path, fingerprint: JsonObject, record: JsonObject
) -> str:
    """Return why a run begins in a new folder, for the start-up log.

    Args:
        point: the resume point so far, with the folder that the user asked for.
        folder: the new folder.
        fingerprint: the fingerprint of this run.
        record: what ``run.json`` will say about the data and the settings.
    """
    if point.checkpoint:
        return f"resumes from {point.checkpoint}"
    if folder == point.folder:
        return "new"

    reason = f"new; {point.folder} is taken"
    taken_record = read_object(point.folder / "run.json")
    if read_object(point.folder / "status.json").get("state") == "finished":
        return reason
    taken_fingerprint = taken_record.get("fingerprint")
    if not isinstance(taken_fingerprint, dict):
        return reason
    for key, value in _as_json(fingerprint).items():
        if taken_fingerprint.get(key) != value:
            changed = named_difference(
                key,
                taken_fingerprint.get(key),
                value,
                before_record=taken_record,
                now_record=record,
            )
            reason = f"{reason} by a run with {_different(key)}: {changed}"
            break
    return reason


def _different(key: str) -> str:
    """Return a key of the fingerprint that differs, in words, such as ``a different objective``."""
    article = "" if key in _PLURAL_KEYS else "a "
    return f"{article}different {key.replace('_', ' ')}"


def _as_json(fingerprint: JsonObject) -> JsonObject:
    """Return a fingerprint as it is read from a file: numbers as keys become strings."""
    content: JsonObject = json.loads(json_text(fingerprint))
    return content


def _continued(
    point: ResumePoint, record: JsonObject, fingerprint: JsonObject, was_restarted: bool
) -> ResumePoint:
    """Return where an unfinished run continues: at its newest checkpoint, if it has one.

    Args:
        point: the resume point so far, with the folder of the unfinished run. It is kept if the
            run has no checkpoint yet.
        record: ``run.json`` of the unfinished run.
        fingerprint: the fingerprint of this run.
        was_restarted: whether Slurm or the launcher has restarted this command. Then nobody reads
            an error, so a run that has lost all its checkpoints begins again. If it happens a
            second time, the disk is at fault, and the run ends.

    Raises:
        UserError: if the run has checkpoints, and none is intact.
    """
    state = read_object(point.folder / "status.json").get("state")
    point = point._replace(run_id=record["run_id"], follows_failure=state != "preempted")
    known_losses = [
        name for start in record["starts"] for name in start.get("lost_checkpoints", [])
    ]
    try:
        newest = checkpoint.newest_valid(
            point.folder / "checkpoints",
            set_aside=True,
            fingerprint=digest(fingerprint),
            known_losses=known_losses,
        )
    except checkpoint.AllDamagedError as error:
        if not was_restarted or known_losses:
            raise
        return point._replace(
            reason="restarted, without an intact checkpoint; starts again",
            lost_checkpoints=tuple(error.checkpoints),
        )
    if newest is None:
        return point._replace(reason="unfinished, without a checkpoint yet; starts again")

    point = _resumed_from(point, newest)
    return point._replace(reason=f"resumes from step {point.step}")


def newest_model(output_dir: str, command: str) -> str:
    """Return the model folder of the newest finished fine-tuning run next to a run's folder.

    Runs on preferences do not count.

    Args:
        output_dir: the folder of this run. The folders next to it are searched.
        command: a command that makes a fine-tuning run, for the error message.

    Raises:
        UserError: if no such run is finished.
    """
    parent = Path(output_dir).absolute().parent
    models = [
        folder / "model"
        for folder in sorted(parent.glob("*"))
        if _is_finished_fine_tuning(folder) and (folder / "model").is_dir()
    ]
    shown_parent = Path(output_dir).parent
    if not models:
        raise UserError(
            f"no fine-tuning run in {shown_parent} has finished: run {command} first, or name a "
            "model with --model_name_or_path."
        )
    newest = max(models, key=lambda folder: folder.stat().st_mtime)
    shown = shown_parent / newest.relative_to(parent)
    say("model", f"{shown} (of the newest finished fine-tuning run in {shown_parent})")
    return str(shown)


def _is_finished_fine_tuning(folder: Path) -> bool:
    """Return whether a folder holds a finished run that trained a model on chats, or further."""
    if read_object(folder / "status.json").get("state") != "finished":
        return False
    record = read_object(folder / "run.json")
    settings = record.get("settings")
    takes_model = isinstance(settings, dict) and "model_name_or_path" in settings
    task = record.get("task")
    return task == "conversations" or (task == "text" and takes_model)


def _lock_folder(lock: contextlib.ExitStack, folder: Path, is_absent: bool, is_run: bool) -> bool:
    """Make ``lock`` hold the lock of a folder, which is made if it is absent.

    Processes whose launcher was killed may still hold the lock of a run, to save and end. They get
    a minute.

    Returns:
        ``False`` if another start has the folder.

    Raises:
        UserError: if the folder cannot be made or locked.
    """
    try:
        if is_absent:
            # This fails for the slower one of two starts, even without locks.
            folder.mkdir(parents=True)
        try:
            lock.enter_context(file_lock(folder / ".lock", _READER_SECONDS))
        except BlockingIOError:
            if not is_run:
                return False
            say(
                "run",
                f"{folder} is in use; waiting up to {_WAIT_SECONDS:g} s for that run to end before "
                "using another folder",
            )
            lock.enter_context(file_lock(folder / ".lock", _WAIT_SECONDS))
    except (FileExistsError, BlockingIOError):
        return False
    except OSError as error:
        raise UserError(
            f"--output_dir {folder} cannot be used: {error.strerror or first_line(error)}; name a "
            "folder in which you may write, or start again when its disk answers."
        ) from None
    return True


def _is_finished(folder: Path) -> bool:
    return read_object(folder / "status.json").get("state") == "finished"


def _unfinished_record(
    folder: Path, fingerprint: JsonObject, source: Path | None, run_id: str | None
) -> JsonObject | None:
    """Return ``run.json`` of an unfinished run that this start may continue.

    Args:
        folder: the folder of the run.
        fingerprint: the fingerprint of this run, which the unfinished run must have.
        source: the checkpoint that the user has named, if any. The unfinished run must have begun
            from it.
        run_id: the id that the unfinished run must have; ``None`` for any.

    Returns:
        ``None`` for any other run.

    Raises:
        UserError: if a newer llmtrain has written the unfinished run.
    """
    if _is_finished(folder):
        return None
    record = read_versioned(folder / "run.json")
    if record.get("fingerprint_sha256") != digest(fingerprint):
        return None
    if run_id is not None and record["run_id"] != run_id:
        return None
    if source is not None:
        origins = [start["from"] for start in record["starts"]]
        if origins[:1] != [str(source)]:
            return None
    return record


def _named_checkpoint(
    path: Path, fingerprint: JsonObject, record: JsonObject
) -> tuple[Path, JsonObject]:
    """Return a checkpoint that the user has named, and its fingerprint.

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
    for key, value in _as_json(fingerprint).items():
        named_value = named_fingerprint.get(key)
        if key not in MAY_CHANGE and named_value != value:
            reason = named_difference(
                key,
                named_value,
                value,
                before_record=read_object(named.parent.parent / "run.json"),
                now_record=record,
            )
            raise UserError(f"{flag} has {_different(key)}: {reason}; {_remedy(key, path)}.")

    for key in _TOLD_KEYS:
        before = named_fingerprint.get(key)
        now = _as_json(fingerprint).get(key)
        if before != now:
            say("changed", f"{key.replace('_', ' ')}: {difference(before, now)}")
    return named, named_fingerprint


def _remedy(key: str, path: Path) -> str:
    """Return what to do about a checkpoint that differs from this run in a key of the fingerprint.

    Args:
        key: the key.
        path: the run or the checkpoint, as the user has named it.
    """
    same = f"resume with the same {key.replace('_', ' ')}"
    if key == "data":
        return (
            f"{same}, or start a new run from its model: recipes/finetune.py --model_name_or_path "
            f"{path}"
        )
    return f"{same}, or leave out --resume_from_checkpoint to start a new run"


def _resumed_from(
    point: ResumePoint, path: Path, named_fingerprint: JsonObject | None = None
) -> ResumePoint:
    """Return the resume point with a checkpoint to resume from.

    Args:
        point: the resume point so far.
        path: the checkpoint.
        named_fingerprint: its fingerprint, if the user has named it.
    """
    state = checkpoint.read_state(path)
    starts = History.read(path.parent.parent).starts
    recorded = [start.get("recompute_every") for start in starts]
    known = [every for every in recorded if every is not None]
    return point._replace(
        checkpoint=path,
        step=state["step"],
        tokens=state["tokens"],
        named_fingerprint=named_fingerprint,
        recompute_every=known[-1] if known else None,
    )
