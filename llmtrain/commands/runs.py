"""List the runs of a folder with their state, their losses and their age; or check one: how it stands, and whether its
checkpoints are whole (status 0, else 1). Nothing is changed."""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text, read_object
from llmtrain.record.history import History, runs_in

_WITH_CHECKPOINT = ("finished", "preempted")  # states that a run reaches by way of a save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "llmtrain runs [FOLDER] [--json]\n       llmtrain runs check RUN [--json]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FOLDER",
        help="what holds the runs to list (default: runs); or check, and a run, its checkpoints folder or a "
        "checkpoint, of which each file is read and compared with its hash",
    )
    parser.add_argument("--json", action="store_true", help="print it for a program")


def run(arguments: argparse.Namespace) -> None:
    checks = arguments.words[:1] == ["check"]
    folders = arguments.words[1:] if checks else arguments.words or ["runs"]
    if len(folders) != 1:
        raise UserError("write llmtrain runs [FOLDER] or llmtrain runs check RUN.")
    path = Path(folders[0])
    try:
        if not checks:
            _list(path, arguments.json)
        else:
            sys.exit(0 if _check(path, arguments.json) else 1)
    except OSError as error:
        raise UserError(f"{error.filename or path} could not be read: {error.strerror or first_line(error)}.") from None


def _list(path: Path, as_json: bool) -> None:
    """The newest first."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name the one that holds runs.")
    runs = sorted((History.of(folder) for folder in runs_in(path)), key=History.age)
    if as_json:
        print(json_text([_facts(run) for run in runs], indent=1))
        return
    if not runs:
        raise UserError(f"{path} holds no runs.")
    width = max(3, *(len(str(run.folder)) for run in runs)) + 2
    print(f"{'run':<{width}}{'state':<12}{'step':>15}{'loss':>10}{'held-out':>10}{'age':>10}")
    for facts in map(_facts, runs):
        step = f"{facts['step']:,}" + (f"/{facts['max_steps']:,}" if facts["max_steps"] else "")
        losses = "".join(f"{'' if facts[key] is None else format(facts[key], '.4f'):>10}" for key in _LOSSES)
        print(f"{facts['run']:<{width}}{facts['state']:<12}{step:>15}{losses}{_span(facts['age']):>10}")


_LOSSES = {"loss": "train/loss", "held_out": "eval/loss"}


def _facts(run: History) -> dict[str, Any]:
    facts = {"run": str(run.folder), "state": run.state, "step": run.step, "max_steps": run.settings.get("max_steps")}
    return {**facts, **{name: run.last(key) for name, key in _LOSSES.items()}, "age": round(run.age(), 1)}


def _span(seconds: float) -> str:
    """A span of time in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _check(path: Path, as_json: bool) -> bool:
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
    history = History.found(home)
    status, in_progress = history.status, history.in_progress
    aside = [] if alone else sorted(folder.glob("damaged-*"))
    leftovers = [] if alone else sorted([*home.glob(".tmp-*"), *folder.glob(".tmp-*")])
    state, step = status.get("state"), status.get("step")
    # said to run at a step when it is saved
    lost = not found and bool(aside or state in _WITH_CHECKPOINT or (state == "running" and step))
    checked = _checked(found, history.record.get("identity_sha256"), alone)
    if as_json:
        each = list(checked)
        well = not lost and not any(one["fault"] for one in each)
        left = {"set_aside": [other.name for other in aside], "leftovers": [other.name for other in leftovers]}
        whole = {"run": str(home), "standing": history.standing(), "well": well, "checkpoints": each, **left}
        print(json_text(whole, indent=1))
        return well
    _say("run", f"{home}: {history.standing()}")
    well = not lost
    if found:
        print(f"{'step':>10}{'size':>12}  {'written':<19}{'held-out':>10}")
    for one in checked:
        held_out = "" if one["held_out"] is None else f"{one['held_out']:.4f}"
        says = [one["fault"] or "whole"]
        says += ["a resume takes this one"] * one["taken"] + ["best held-out loss"] * one["best"]
        line = f"{one['step']:>10}{_size(one['bytes']):>12}  {one['written']:<19}{held_out:>10}"
        print(f"{line}  {'; '.join(says)}", flush=True)
        well = well and one["fault"] is None
    for other in aside:
        _say("set aside", f"{other.name}: a resume found it damaged")
    for other in leftovers:
        what = "is being written or deleted" if in_progress else "left half-written; the next start deletes it"
        _say("leftover", f"{other.name} {what}")
    if not found:
        _say("none", f"no checkpoint is left in {folder}" if lost else "no checkpoint has been made yet")
    return well


def _checked(found: list[Path], identity: str | None, alone: bool) -> Iterator[dict[str, Any]]:
    """Each checkpoint, the newest first, as soon as it has been read."""
    from llmtrain.record.checkpoint import find_fault

    losses = {path: loss for path in found if (loss := _loss(path)) is not None}
    best = min(losses, key=lambda path: losses[path], default=None)
    taken = None
    for path in reversed(found):
        number = path.name.removeprefix("step-")
        facts: dict[str, Any] = {
            "step": int(number) if number.isdecimal() else number,
            "bytes": _bytes(path),
            "written": _time(path),
            "held_out": losses.get(path),
        }
        fault = find_fault(path)
        if fault is None and identity not in (None, read_object(path / "state.json").get("identity_sha256")):
            fault = "it belongs to another run"
        if not path.exists():  # a run in progress deletes old ones
            continue
        if not alone and fault is None and taken is None:
            taken = path
        yield {**facts, "fault": fault, "taken": path == taken, "best": not alone and path == best}


def _loss(path: Path) -> float | None:
    loss = read_object(path / "state.json").get("eval_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    return 0


def _size(size: float) -> str:
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
