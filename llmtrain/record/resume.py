"""The folder that a run lives in, and what it goes on from."""

import itertools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from llmtrain.console import say
from llmtrain.contract import Facts
from llmtrain.errors import UserError, require
from llmtrain.files import read_object
from llmtrain.record import checkpoint
from llmtrain.record.format import read_versioned
from llmtrain.record.provenance import difference, digest

_WAIT_SECONDS = 60.0
_RESTART_COUNTS = (
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)  # above 0: the same start, made again


class Choice(NamedTuple):
    """The folder of a run, and the checkpoint that it goes on from, where there is one."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # updates made
    tokens: int = 0  # trained on
    run_id: str = ""
    incarnation: str = ""  # of this start
    why: str = ""  # for a person
    before: Facts | None = (
        None  # identity of a named checkpoint, which may have other settings of the update
    )

    def going_on(self, path: Path, before: Facts | None = None) -> "Choice":
        """Return the same folder with a checkpoint to go on from."""
        state = checkpoint.read_state(path)
        return self._replace(
            checkpoint=path, step=state["step"], tokens=state["tokens"], before=before
        )


def choose_folder(output_dir: str, resume: str, identity: Facts) -> Choice:
    """Choose where a run lives and what it goes on from, and make the folder.

    Raises :class:`UserError` where what ``resume`` names cannot be gone on with, or no checkpoint of the run is whole.
    """
    choice = Choice(Path(output_dir), run_id=secrets.token_hex(4), incarnation=secrets.token_hex(8))
    if resume not in ("auto", "never"):
        choice = choice.going_on(*_named_checkpoint(Path(resume), identity))
    restarted = any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)
    for place, folder in enumerate(names(output_dir)):
        if is_free(folder):
            folder.mkdir(parents=True, exist_ok=True)
            new = f"new; {output_dir} is taken" if place else "new"
            return choice._replace(
                folder=folder, why=f"goes on from {choice.checkpoint}" if choice.checkpoint else new
            )
        previous = (
            _unfinished(folder, identity, choice.checkpoint)
            if resume != "never" or restarted
            else None
        )
        if previous is not None:
            choice = choice._replace(folder=folder, run_id=previous["run_id"])
            found = checkpoint.newest_valid(folder / "checkpoints", True, digest(identity))
            if found is None:
                return choice._replace(why="begun before, with no checkpoint yet; starts again")
            choice = choice.going_on(found)
            return choice._replace(why=f"goes on from step {choice.step}")
    raise AssertionError("there is always a next name")


def names(output_dir: str) -> Iterator[Path]:
    """Yield the folders that a run may live in: ``output_dir``, and then with -2, -3, ... at its end."""
    base = Path(output_dir)
    if not base.name or base.name == "..":
        base = base.resolve()
    require(base.name, f"--output_dir {output_dir} cannot be a run's folder; name one inside it.")
    yield base
    yield from (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))


def newest_model(output_dir: str, command: str) -> str:
    """Return the model of the newest finished run of those that live in ``output_dir``, or its name with -2, ...

    Raises :class:`UserError`, which names the ``command`` that makes one, where there is none.
    """
    taken = itertools.takewhile(lambda folder: not is_free(folder), names(output_dir))
    found = [
        one / "model"
        for one in taken
        if read_object(one / "status.json").get("state") == "finished"
    ]
    if not found:
        raise UserError(
            f"no finished run in {output_dir} to go on from: first {command}, then this again; or name a model with "
            "--model_name_or_path."
        )
    newest = str(max(found, key=lambda folder: folder.stat().st_mtime))
    say("model", f"{newest}, the newest finished run's")
    return newest


def is_free(folder: Path) -> bool:
    """Return whether nothing but leftovers lies in a folder. Raises :class:`UserError` where it is a file."""
    require(folder.is_dir() or not folder.exists(), f"--output_dir {folder} is a file.")
    return not folder.exists() or all(
        path.name.startswith((".lock", ".tmp-")) for path in folder.iterdir()
    )


def lock(folder: Path) -> filelock.FileLock:
    """Return the lock that a run holds while it writes into its folder."""
    return filelock.FileLock(folder / ".lock")


def _unfinished(folder: Path, identity: Facts, source: Path | None) -> Facts | None:
    """Return ``run.json`` of a run that can be gone on with: same identity, not finished, not running.

    Where a checkpoint was named, ``source``, the run must have begun from it.

    Raises:
        UserError: a newer llmtrain has written the unfinished run.
    """
    if read_object(folder / "status.json").get("state") == "finished":
        return None
    record = read_versioned(folder / "run.json")
    if record.get("identity_sha256") != digest(identity):
        return None
    if (
        source is not None
        and [str(source)] != [start["from"] for start in record.get("starts", [])][:1]
    ):
        return None
    for patience in (
        0.0,
        _WAIT_SECONDS,
    ):  # a launcher that was killed leaves processes that save and then end
        try:
            with lock(folder).acquire(timeout=patience):
                return (
                    record
                    if read_object(folder / "status.json").get("state") != "finished"
                    else None
                )
        except filelock.Timeout:
            if not patience:
                say(
                    "run",
                    f"{folder} is in use; waiting {_WAIT_SECONDS:g} s for it to end before taking another name",
                )
    return None


def _named_checkpoint(path: Path, identity: Facts) -> tuple[Path, Facts]:
    """Return a checkpoint that a person has named, by itself or by its run, and its identity."""
    named = f"--resume_from_checkpoint {path}"
    of_run = path / "checkpoints"
    found = checkpoint.newest_valid(of_run) if of_run.is_dir() else path
    if found is None:
        raise UserError(f"{named}: this run has no checkpoint yet.")
    if not (found / checkpoint.MANIFEST).exists():
        raise UserError(
            f"{named} is neither a run's folder nor a checkpoint; use auto, never or such a folder."
        )
    if found is path and (fault := checkpoint.find_fault(path)):
        raise UserError(f"{named} is damaged: {fault}.")
    before: Facts = checkpoint.read_state(found)["identity"]
    for key, value in json.loads(
        json.dumps(identity)
    ).items():  # whose keys are words, as those of a file
        if before.get(key) != value and key not in ("update", "exchange", "stopping"):
            raise UserError(f"{named} has another {key}: {difference(before.get(key), value)}.")
    if before.get("exchange") != identity.get("exchange"):
        ways = [ways.get("exchange") or "exactly" for ways in (before, identity)]
        say("changed", f"how gradients are exchanged: {ways[0]} -> {ways[1]}")
    return found, before
