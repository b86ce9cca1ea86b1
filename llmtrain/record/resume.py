"""Choose the folder that a run lives in, and the checkpoint that it resumes from."""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, digest, json_text, names_in, read_object
from llmtrain.locks import file_lock
from llmtrain.record import checkpoint
from llmtrain.record.history import candidate_folders, is_free, seconds_of
from llmtrain.record.remote_runs import RemoteRun
from llmtrain.record.run_record import (
    difference,
    first_difference,
    read_versioned,
    start_times,
)
from llmtrain.storage import Storage, is_address

_WAIT_SECONDS = 60.0  # for an unfinished run whose lock another process still holds
_READER_SECONDS = 1.0  # for a process that only checks whether a run is in progress
# Keys of the fingerprint that may differ from those of a checkpoint that the user has named. The
# changes of some are told here; other lines tell how the optimizer has changed.
_TOLD_KEYS = ("random", "callbacks", "metrics", "own_settings")
MAY_CHANGE = (*_TOLD_KEYS, "optimizer", "learning_rates", "early_stopping")
# Above 0 if the launcher or Slurm has started the same command again.
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class ResumePoint(NamedTuple):
    """The folder of a run, and the checkpoint that it resumes from, if there is one."""

    folder: Path
    state: JsonObject  # what the run takes over of state.json; empty without a checkpoint
    checkpoint: Path | None = None
    run_id: str = ""
    start_id: str = ""  # distinguishes the starts in one folder
    fingerprint_sha256: str = ""
    reason: str = ""  # the reason for this start, for the start-up log
    earlier_record: JsonObject | None = None  # run.json of the unfinished run; None for a new run
    extends: JsonObject | None = None  # what run.json says about the run that this one extends

    @property
    def step(self) -> int:
        """Steps made until the checkpoint."""
        step: int = self.state.get("step", 0)
        return step


class _Request(NamedTuple):
    """What a start was asked for, and what it is about to train."""

    resume: str  # auto, never, or the folder or address of a run or of a checkpoint
    is_restart: bool  # whether Slurm or the launcher has restarted this command
    run_id: str | None  # which a sweep has chosen
    fingerprint: JsonObject  # as it is read from a file
    fingerprint_sha256: str
    record: JsonObject  # what run.json will say about the data and the settings
    named: Path | None = None  # the checkpoint that `resume` names
    remote: RemoteRun | None = None  # this very run, if `resume` is its address


@contextlib.contextmanager
def choose_folder(
    output_dir: str,
    resume: str,
    fingerprint: JsonObject,
    record: JsonObject | None = None,
    run_id: str | None = None,
    mirror: str | None = None,
) -> Iterator[ResumePoint]:
    """Choose where a run lives and what it resumes from, and hold the folder's lock.

    The lock is held until the block ends. Two starts at the same moment therefore never share a
    folder: the slower one takes the next name.

    Args:
        output_dir: the folder that the user asked for. If another run has it, the run gets the
            same name with -2, -3, ... at its end.
        resume: ``auto``, ``never``, or the folder or address of a run or of a checkpoint.
        fingerprint: the fingerprint of this run. Only a run of the same fingerprint is resumed.
        record: what ``run.json`` will say about the data and the settings, for error messages.
        run_id: the id of the run, if a sweep has chosen it. Only a run of this id is resumed.
        mirror: the address that the run will be copied to. If ``resume`` is the same, and nothing
            is there, the run is a new one.

    Raises:
        UserError: if the checkpoint that ``resume`` names cannot be used, if no checkpoint of the
            run is intact, or if another version of llmtrain has written it. Also if the disk fails
            for several seconds, which is no damage: nothing is renamed then.
    """
    request = _Request(
        resume=resume,
        is_restart=any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS),
        run_id=run_id,
        # Numbers as keys become strings, and tuples become lists.
        fingerprint=json.loads(json_text(fingerprint)),
        fingerprint_sha256=digest(fingerprint),
        record=record or {},
    )
    request = _with_named_checkpoint(request, mirror)

    with contextlib.ExitStack() as lock:
        for folder in _folders_to_try(output_dir, request):
            is_absent = names_in(folder) is None
            earlier_record = _usable_record(folder, request)
            if earlier_record is None:
                continue
            if _lock_folder(lock, folder, is_absent, is_run=earlier_record != {}):
                # Another start may have used the folder, or finished the run, in the meantime.
                earlier_record = _usable_record(folder, request)
                if earlier_record is not None:
                    break
                lock.close()

        wanted = next(candidate_folders(output_dir))
        yield _resume_point(folder, wanted, earlier_record or {}, request)


def _with_named_checkpoint(request: _Request, mirror: str | None) -> _Request:
    """Return a request with the run or the checkpoint that ``--resume_from_checkpoint`` names."""
    resume = request.resume
    if resume in ("auto", "never"):
        return request
    if not is_address(resume):
        return request._replace(named=_named_checkpoint(Path(resume), request))
    if resume == mirror and not Storage(resume).sizes("run.json"):
        return request  # the first start of a command that resumes from its own mirror

    remote = RemoteRun(resume)
    # A checkpoint that is named is where another run begins.
    names_run = "/checkpoints/step-" not in resume
    if names_run and remote.fingerprint_sha256 == request.fingerprint_sha256:
        return request._replace(remote=remote, run_id=remote.run_id)
    return request._replace(named=_named_checkpoint(remote.cached_checkpoint(), request))


def _folders_to_try(output_dir: str, request: _Request) -> Iterator[Path]:
    """Yield the folders that a run may use, in the order in which a start tries them.

    With ``never``, the run that a launcher restarts is the one that has started last.
    """
    taken: list[Path] = []
    if request.resume == "never" and request.is_restart:
        candidates = candidate_folders(output_dir)
        taken += itertools.takewhile(lambda folder: not is_free(folder), candidates)
        taken.sort(key=_time_of_last_start)
        yield from reversed(taken)
    yield from itertools.islice(candidate_folders(output_dir), len(taken), None)


def _time_of_last_start(folder: Path) -> float:
    """Return when a run was last started, in seconds since 1970; 0 if that is not known."""
    starts = read_object(folder / "run.json").get("starts") or [{}]
    return seconds_of(starts[-1].get("time")) or 0.0


def _usable_record(folder: Path, request: _Request) -> JsonObject | None:
    """Return ``run.json`` of an unfinished run that a start continues.

    Returns:
        An empty object for a free folder; ``None`` for a folder that is taken.

    Raises:
        UserError: if another version of llmtrain has written the unfinished run.
    """
    if is_free(folder):
        return {}
    may_continue = request.resume != "never" or request.is_restart
    if not may_continue or read_object(folder / "status.json").get("state") == "finished":
        return None

    record = read_versioned(folder / "run.json")
    has_same_id = request.run_id in (None, record.get("run_id"))
    has_same_fingerprint = record.get("fingerprint_sha256") == request.fingerprint_sha256
    if not has_same_id or not has_same_fingerprint:
        return None
    if request.named is not None:
        # A run that began from another checkpoint is another run.
        origins = [start["from"] for start in record["starts"]]
        if origins[:1] != [str(request.named)]:
            return None
    return record


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


def _resume_point(
    folder: Path, wanted: Path, earlier_record: JsonObject, request: _Request
) -> ResumePoint:
    """Return where a start begins in a folder whose lock it holds.

    Args:
        folder: the folder of the run.
        wanted: the folder that the user asked for.
        earlier_record: ``run.json`` of the unfinished run; empty for a new run.
        request: what the start was asked for.

    Raises:
        UserError: if the run has checkpoints, and none is intact.
    """
    own = None
    if earlier_record:
        own = checkpoint.newest_valid(
            folder / "checkpoints",
            set_aside=True,
            fingerprint=request.fingerprint_sha256,
            has_mirror=request.remote is not None,
        )
    if request.remote is not None:
        own = request.remote.newest_checkpoint(folder, own)
        earlier_record = read_versioned(folder / "run.json")
    path = own or request.named
    state = {}
    extends = earlier_record.get("extends")
    if path is not None:
        state = _state_to_take_over(path, request, is_own=own is not None)
        maker_record = read_object(path.parent.parent / "run.json")
        if own is None and maker_record and extends is None:
            extends = {
                "run": str(path.parent.parent),
                "run_id": maker_record.get("run_id"),
                "step": state["step"],  # the last one that is taken over
                "start_times": start_times(maker_record),
            }

    if own is not None:
        reason = f"resumes from step {state['step']}"
    elif earlier_record:
        reason = "unfinished, without a checkpoint yet; starts again"
    elif request.named is not None:
        reason = f"resumes from {request.named}"
    else:
        reason = "new" if folder == wanted else f"new; {_reason_why_taken(wanted, request)}"

    return ResumePoint(
        folder=folder,
        checkpoint=path,
        state=state,
        run_id=earlier_record.get("run_id") or request.run_id or secrets.token_hex(4),
        start_id=secrets.token_hex(8),
        fingerprint_sha256=request.fingerprint_sha256,
        reason=reason,
        earlier_record=earlier_record or None,
        extends=extends,
    )


def _state_to_take_over(path: Path, request: _Request, is_own: bool) -> JsonObject:
    """Return what a run takes over of the ``state.json`` of a checkpoint."""
    state = checkpoint.read_state(path)
    if not is_own:
        # The other run may delete its best checkpoint before this one ends.
        state["best"] = None
    if state["fingerprint_sha256"] != request.fingerprint_sha256:
        # With more steps, or another callback, the run goes on.
        state["finish_reason"] = ""
    return state


def _reason_why_taken(wanted: Path, request: _Request) -> str:
    """Return why a run cannot use the folder that the user asked for, for the start-up log."""
    reason = f"{wanted} is taken"
    taken_record = read_object(wanted / "run.json")
    taken_fingerprint = taken_record.get("fingerprint")
    is_finished = read_object(wanted / "status.json").get("state") == "finished"
    if is_finished or not isinstance(taken_fingerprint, dict):
        return reason
    change = first_difference(taken_fingerprint, taken_record, request.fingerprint, request.record)
    if change is None:
        return reason
    key, difference_text = change
    return f"{reason} by a run that differs in {key.replace('_', ' ')}: {difference_text}"


def _named_checkpoint(path: Path, request: _Request) -> Path:
    """Return a checkpoint that the user has named.

    Args:
        path: the folder of a checkpoint, or of a run, whose newest checkpoint is used.
        request: what this start is about to train. Its fingerprint must be that of the checkpoint,
            except for a few keys such as the optimizer settings.

    Raises:
        UserError: if there is no such checkpoint, if it is damaged, or if it has another
            fingerprint.
    """
    flag = f"--resume_from_checkpoint {request.resume}"
    if (path / "checkpoints").is_dir():
        named = checkpoint.newest_valid(path / "checkpoints")
        if named is None:
            raise UserError(f"{flag}: this run has no checkpoint yet.")
    elif (path / checkpoint.MANIFEST).exists():
        named = path
        fault = checkpoint.find_fault(path)
        if fault:
            raise UserError(f"{flag} is damaged: {fault}.")
    else:
        raise UserError(
            f"{flag} is neither a run folder nor a checkpoint; use auto, never or such a folder."
        )

    named_fingerprint: JsonObject = checkpoint.read_state(named)["fingerprint"]
    named_record = read_object(named.parent.parent / "run.json")
    change = first_difference(
        named_fingerprint, named_record, request.fingerprint, request.record, ignored=MAY_CHANGE
    )
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
        now = request.fingerprint.get(key)
        if before != now:
            say("changed", f"{key.replace('_', ' ')}: {difference(before, now)}")
    return named
