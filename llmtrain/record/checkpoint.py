"""Checkpoints, which are complete or absent, and have a hash for every file.

They hold safetensors and JSON only:

    step-00000400/
      model/            what from_pretrained loads; if the model is sharded, a file of each rank
      optimizer/        state of the optimizer: safetensors, and structure.json for all else
      parts/NAME/       state of what the user brings, likewise
      state.json        format version, step, tokens, fingerprint, best evaluation
      MANIFEST.json     format version; bytes and sha256 of every file above

:class:`llmtrain.record.saver.Saver` writes them. This module finds, lists, checks and
deletes them.
"""

import contextlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from llmtrain.console import note, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import (
    ABSENCES,
    JsonObject,
    UnreadableError,
    damaged_files,
    names_in,
    read_object,
    read_patiently,
    temporary_sibling,
)
from llmtrain.record.history import candidate_folders
from llmtrain.record.run_record import FORMAT_VERSION, VERSION_KEY, check_format

MANIFEST = "MANIFEST.json"
STRUCTURE = "structure.json"  # what a state has besides tensors
_NAME = re.compile(r"step-\d{8,}")


def checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints in a folder, oldest first."""
    paths = [folder / name for name in names_in(folder) or [] if _NAME.fullmatch(name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def newest_valid(
    folder: Path, set_aside: bool = False, fingerprint: str | None = None, has_mirror: bool = False
) -> Path | None:
    """Return the newest intact checkpoint, or ``None`` if the run has never saved one.

    Args:
        folder: the run's ``checkpoints`` folder.
        set_aside: rename damaged checkpoints, so that no later start reads them again.
        fingerprint: sha256 of the run's fingerprint. A checkpoint of another run counts as damaged.
        has_mirror: return ``None``, too, if no checkpoint is intact: the mirror may have one.

    Raises:
        UserError: if there are checkpoints, and none is intact: starting from the beginning would
            hide the loss. Also if the newest is in another format, or if its disk fails: an older
            one would silently repeat its steps.
    """
    for path in reversed(checkpoints(folder)):
        fault = find_fault(path, fingerprint)
        if fault is None:
            return path

        say("resume", f"{path.name} is damaged: {fault}")
        if set_aside:
            names = candidate_folders(str(path.with_name(f"damaged-{path.name}")))
            path.rename(next(name for name in names if not name.exists()))

    for name in names_in(folder) or []:
        if not has_mirror and (name.startswith("damaged-") or _NAME.fullmatch(name)):
            raise UserError(
                f"no checkpoint in {folder} is intact; use --resume_from_checkpoint never to start "
                "a new run."
            )
    return None


def find_fault(path: Path, fingerprint: str | None = None) -> str | None:
    """Return why a checkpoint cannot be trusted, or ``None`` if it is intact.

    The folder must hold exactly the files of its manifest, with their bytes. Its state must belong
    to the step in its name, and to the run whose fingerprint has this sha256. Links are not
    followed, and names in the manifest never lead out of the folder.

    Raises:
        UserError: if another version of llmtrain has written the checkpoint, which is no damage.
        UnreadableError: if the disk fails, which is no damage either.
    """
    try:
        return read_patiently(path, lambda: next(_faults(path, fingerprint), None))
    except (*ABSENCES, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} or state.json: {first_line(error)}"


def _faults(path: Path, fingerprint: str | None) -> Iterator[str]:
    """Yield the faults of a checkpoint. After the first one, a later check may raise an error."""
    if path.is_symlink():
        yield "it is a link"
    present = file_names(path)
    if MANIFEST not in present:
        yield f"{MANIFEST} is missing"

    # Is every file there, and no other?
    hashes = read_file(path / MANIFEST)["files"]
    for name in sorted({"state.json", *hashes} - present):
        yield f"{name} is missing"
    for name in sorted(present - {MANIFEST} - hashes.keys()):
        yield f"{name} is not in the manifest"

    for name in damaged_files(path, hashes):
        yield f"{name} differs from its hash"

    state = read_state(path)
    if path != path_of(path.parent, state["step"]):
        yield f"it holds step {state['step']}"
    if fingerprint is not None and fingerprint != state.get("fingerprint_sha256"):
        yield "it belongs to another run"


def read_state(path: Path) -> JsonObject:
    """Return the content of a checkpoint's ``state.json``; see :func:`read_file`."""
    return read_file(path / "state.json")


def read_file(path: Path) -> JsonObject:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        UserError: if another version of llmtrain has written the file, or if its disk fails.
        ValueError: if the file is damaged.
    """
    content = dict(json.loads(read_patiently(path, path.read_text)))
    check_format(path, content)
    version = content.get(VERSION_KEY)
    if version != FORMAT_VERSION:
        raise ValueError(f"{path.name} has format version {version}")
    return content


def part_names(path: Path) -> list[str]:
    """Return the names of the parts that have a state in a checkpoint."""
    return sorted(folder.name for folder in path.glob("parts/*") if folder.is_dir())


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def prune(folder: Path, keep: int, verified: Collection[Path]) -> None:
    """Delete old checkpoints, after a newer one was committed.

    These stay:

    - the newest ``keep``,
    - the newest two that this process has written, or read completely,
    - the one with the lowest eval loss,
    - the best one by ``--metric_for_best_model``, if the run keeps it.

    Args:
        folder: the folder of the checkpoints.
        keep: how many of the newest checkpoints stay, at least 1.
        verified: the checkpoints that this process has written, or read completely.
    """
    paths = checkpoints(folder)
    kept = {*paths[-keep:], *[path for path in paths if path in verified][-2:]}
    try:
        losses = eval_losses(paths)
        kept.add(min(losses, key=losses.__getitem__, default=paths[-1]))
        best = read_object(paths[-1] / "state.json").get("best")  # see `Patience.state`
        if best:
            kept.add(path_of(folder, best["step"]))
    except UnreadableError as error:
        note(f"no checkpoint was deleted: {error}")
        return

    for path in paths:
        if path not in kept:
            # Rename it first: a crash must not leave half of a committed checkpoint.
            doomed = path.rename(temporary_sibling(path, "doomed"))
            shutil.rmtree(doomed, ignore_errors=True)


def eval_losses(paths: Iterable[Path]) -> dict[Path, float]:
    """Return the eval loss of each checkpoint that was evaluated when it was made."""
    losses = {}
    for path in paths:
        loss = read_object(path / "state.json").get("eval_loss")
        if isinstance(loss, float) and math.isfinite(loss):
            losses[path] = loss
    return losses


def saved_checkpoints(paths: Sequence[Path]) -> Iterator[tuple[Path, JsonObject]]:
    """Yield each checkpoint with its description, the newest first.

    Checkpoints that a running process deletes in the meantime are skipped. A description has these
    keys:

    - ``step``: the number in its name, or the name if it has none,
    - ``size``: the bytes of its files, or 0 if they cannot be read,
    - ``written``: when it was committed, in seconds since 1970,
    - ``eval_loss``: the eval loss at this step, if it was evaluated,
    - ``is_best``: whether this eval loss is the lowest of the listed checkpoints.

    Args:
        paths: the folders of the checkpoints, the oldest first.
    """
    losses = eval_losses(paths)
    best = min(losses, key=losses.__getitem__, default=None)
    for path in reversed(paths):
        manifest = path / MANIFEST
        try:
            written = (manifest if manifest.exists() else path).lstat().st_mtime
        except FileNotFoundError:
            continue

        size = 0
        with contextlib.suppress(OSError):
            size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        number = path.name.removeprefix("step-")
        yield (
            path,
            {
                "step": int(number) if number.isdecimal() else number,
                "size": size,
                "written": written,
                "eval_loss": losses.get(path),
                "is_best": path == best,
            },
        )


def state_hashes(path: Path) -> dict[str, str]:
    """Return the sha256 of each file of a checkpoint that has weights or a state."""
    return {
        name: entry["sha256"]
        for name, entry in read_file(path / MANIFEST)["files"].items()
        if name.endswith((".safetensors", STRUCTURE))
    }


def file_names(folder: Path) -> set[str]:
    """Return the names of all files below a folder, relative to it. Links are left out.

    Raises:
        OSError: if the disk fails. ``Path.rglob`` would leave files out.
    """

    def fail(error: OSError) -> None:
        raise error

    files = set()
    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                files.add(str(path.relative_to(folder)))
    return files
