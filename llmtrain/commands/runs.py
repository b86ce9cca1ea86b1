"""Say how a run stands and whether its checkpoints are whole (status 0, else 1). Nothing is changed."""

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError, first_line

_WITH_CHECKPOINT = ("finished", "preempted")  # states that a run reaches by way of a save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["check"], help="read all checkpoints and compare each file with its hash")
    parser.add_argument("run_folder", metavar="RUN", help="a run's folder, its checkpoints folder or one checkpoint")


def run(arguments: argparse.Namespace) -> None:
    path = Path(arguments.run_folder)
    try:
        sys.exit(0 if _check(path) else 1)
    except OSError as error:
        raise UserError(f"{error.filename or path} could not be read: {error.strerror or first_line(error)}.") from None


def _check(path: Path) -> bool:
    """Print what there is to say; whether all is well."""
    from llmtrain.record.checkpoint import MANIFEST, checkpoints

    place = path.absolute()  # "." too has a name
    alone = False
    if path.is_dir() and (place.name.startswith("step-") or (path / MANIFEST).exists()):
        folder, found, alone = place.parent, [place], True
    elif any((path / name).exists() for name in ("run.json", "status.json")) or (path / "checkpoints").is_dir():
        folder, found = place / "checkpoints", checkpoints(place / "checkpoints")
    elif path.is_dir() and (place.name == "checkpoints" or checkpoints(path)):
        folder, found = place, checkpoints(place)
    else:
        raise UserError(f"{path} is neither a run's folder nor a checkpoint; name one, such as runs/gpt.")
    home = folder.parent
    status = _read(home / "status.json")
    in_progress = _is_held(home / ".lock")
    _say("run", f"{home}: {_standing(status, in_progress)}")
    well = _check_each(found, _read(home / "run.json").get("identity_sha256"), alone)
    if alone:
        return well
    aside = sorted(folder.glob("damaged-*"))
    for other in aside:
        _say("set aside", f"{other.name}: a resume found it damaged")
    for other in sorted([*home.glob(".tmp-*"), *folder.glob(".tmp-*")]):
        what = "is being written or deleted" if in_progress else "left half-written; the next start deletes it"
        _say("leftover", f"{other.name} {what}")
    if found:
        return well
    state, step = status.get("state"), status.get("step")
    if aside or state in _WITH_CHECKPOINT or (state == "running" and step):  # said to run at a step when it is saved
        _say("none", f"no checkpoint is left in {folder}")
        return False
    _say("none", "no checkpoint has been made yet")
    return True


def _standing(status: dict[str, Any], in_progress: bool) -> str:
    if not status:
        return "in progress, without a status.json that can be read" if in_progress else "no status.json can be read"
    said = f"{status.get('state')} at step {status.get('step')}, {status.get('time')}"
    if status.get("reason"):
        said += f": {status['reason']}"
    if in_progress:
        said += "; in progress, a process holds its lock"
    elif status.get("state") == "running":
        host = status.get("host")
        elsewhere = "" if host == platform.node() else f", or it runs on {host}"
        said += f"; no process holds its lock: it was killed{elsewhere}"
    return said


def _check_each(found: list[Path], identity: str | None, alone: bool) -> bool:
    """Print a line for each, newest first; whether all are whole."""
    from llmtrain.record.checkpoint import find_fault

    losses = {path: loss for path in found if (loss := _loss(path)) is not None}
    best = min(losses, key=lambda path: losses[path], default=None)
    well, taken = True, None
    if found:
        print(f"{'step':>10}{'size':>12}  {'written':<19}{'held-out':>10}")
    for path in reversed(found):
        step = path.name.removeprefix("step-").lstrip("0") or "0"
        held_out = f"{losses[path]:.4f}" if path in losses else ""
        line = f"{step:>10}{_size(path):>12}  {_time(path):<19}{held_out:>10}"
        fault = find_fault(path)
        if fault is None and identity not in (None, _read(path / "state.json").get("identity_sha256")):
            fault = "it belongs to another run"
        if not path.exists():  # a run in progress deletes old ones
            continue
        well = well and fault is None
        says = [fault or "whole"]
        if not alone and fault is None and taken is None:
            taken = path
            says.append("a resume takes this one")
        if not alone and path == best:
            says.append("best held-out loss")
        print(f"{line}  {'; '.join(says)}", flush=True)
    return well


def _is_held(lock: Path) -> bool:
    """Whether a process has locked it. It is not opened to be written, as :class:`filelock.FileLock` would, and the
    shared lock that tells is given back at once."""
    import fcntl

    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _loss(path: Path) -> float | None:
    loss = _read(path / "state.json").get("eval_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _size(path: Path) -> str:
    size = 0.0
    with contextlib.suppress(OSError):
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _time(path: Path) -> str:
    """When it was committed, or else when its folder was last changed."""
    for file in (path / "MANIFEST.json", path):
        with contextlib.suppress(OSError):
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.lstat().st_mtime))
    return ""


def _say(label: str, text: str) -> None:
    print(f"{label:<10}{text}")
