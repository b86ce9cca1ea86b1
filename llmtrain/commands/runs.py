"""List the runs of a folder with their state, their losses and their age; or check one.

A check says how the run stands, and whether its checkpoints are whole (status 0, else 1). Nothing is changed.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.console import note, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text
from llmtrain.record.history import History, is_run, runs_in
from llmtrain.types import Facts

_WITH_CHECKPOINT = ("finished", "preempted")  # states that a run reaches by way of a save
_LOSSES = {"loss": "train/loss", "held_out": "eval/loss"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "llmtrain runs [FOLDER] [--json]\n       llmtrain runs check RUN [--json]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FOLDER",
        help="what holds the runs to list (default: runs); or check, and a run, its checkpoints folder or a "
        "checkpoint, of which each file is read and compared with its hash",
    )


def run(arguments: argparse.Namespace) -> None:
    should_check = arguments.words[:1] == ["check"]
    folders = arguments.words[1:] if should_check else arguments.words or ["runs"]
    if len(folders) != 1:
        raise UserError("write llmtrain runs [FOLDER] or llmtrain runs check RUN.")

    path = Path(folders[0])
    try:
        if should_check:
            sys.exit(0 if _check(path, arguments.json) else 1)
        _list(path, arguments.json)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} could not be read: {error.strerror or first_line(error)}."
        ) from None


def _list(path: Path, as_json: bool) -> None:
    """Print the runs, the newest first."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name the one that holds runs.")

    histories = []
    refusals = []
    for folder in runs_in(path):
        try:
            histories.append(History.of(folder))
        except UserError as error:  # another version of llmtrain has written it
            refusals.append(str(error))

    histories.sort(key=History.age)
    runs = [_listed(history) for history in histories]
    if not runs and not refusals and not as_json:
        raise UserError(f"{path} holds no runs.")
    for refusal in refusals:
        note(refusal)
    if as_json:
        print(json_text(runs, indent=1))
        return
    if not runs:
        return

    width = max(3, *(len(run["run"]) for run in runs)) + 2
    print(f"{'run':<{width}}{'state':<12}{'step':>15}{'loss':>10}{'held-out':>10}{'age':>10}")
    for run in runs:
        step = f"{run['step']:,}"
        if run["max_steps"]:
            step += f"/{run['max_steps']:,}"
        losses = ""
        for key in _LOSSES:
            loss = "" if run[key] is None else f"{run[key]:.4f}"
            losses += f"{loss:>10}"
        print(f"{run['run']:<{width}}{run['state']:<12}{step:>15}{losses}{_span(run['age']):>10}")


def _listed(history: History) -> Facts:
    """Return what the list shows of a run."""
    losses = {name: history.last(key) for name, key in _LOSSES.items()}
    return {
        "run": str(history.folder),
        "state": history.state,
        "step": history.step,
        "max_steps": history.settings.get("max_steps"),
        **losses,
        "age": round(history.age(), 1),
    }


def _span(seconds: float) -> str:
    """Return a span of time in its largest unit."""
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    unit, size = next(
        ((unit, size) for unit, size in units.items() if seconds >= 2 * size), ("s", 1)
    )
    return f"{seconds / size:.0f} {unit}"


def _check(path: Path, as_json: bool) -> bool:
    """Print how a run and its checkpoints stand; returns whether all is well."""
    from llmtrain.record.checkpoint import MANIFEST, checkpoints

    place, alone = path.absolute(), False  # "." too has a name
    if path.is_dir() and (place.name.startswith("step-") or (path / MANIFEST).exists()):
        folder, found, alone = place.parent, [place], True
    elif is_run(path) or (path / "checkpoints").is_dir():
        folder, found = place / "checkpoints", checkpoints(place / "checkpoints")
    elif path.is_dir() and (place.name == "checkpoints" or checkpoints(path)):
        folder, found = place, checkpoints(place)
    else:
        raise UserError(
            f"{path} is neither a run's folder nor a checkpoint; name one, such as runs/gpt."
        )
    home = folder.parent
    history = History.found(home)
    aside = [] if alone else [one.name for one in sorted(folder.glob("damaged-*"))]
    leftovers = (
        []
        if alone
        else [one.name for one in sorted([*home.glob(".tmp-*"), *folder.glob(".tmp-*")])]
    )
    state, step = history.status.get("state"), history.status.get("step")
    # said to run at a step when it is saved
    lost = not found and bool(aside or state in _WITH_CHECKPOINT or (state == "running" and step))
    standing, checked = history.standing(), []
    if not as_json:
        say("run", f"{home}: {standing}")
        if found:
            print(f"{'step':>10}{'size':>12}  {'written':<19}{'held-out':>10}")
    for one in _checked(found, history.record.get("identity_sha256"), alone):
        checked.append(one)
        if not as_json:
            held_out = "" if one["held_out"] is None else f"{one['held_out']:.4f}"
            says = [one["fault"] or "whole"]
            says += ["a resume takes this one"] * one["taken"] + ["best held-out loss"] * one[
                "best"
            ]
            line = f"{one['step']:>10}{_size(one['bytes']):>12}  {one['written']:<19}{held_out:>10}"
            print(f"{line}  {'; '.join(says)}", flush=True)
    well = not lost and not any(one["fault"] for one in checked)
    if as_json:
        facts = {"run": str(home), "standing": standing, "well": well, "checkpoints": checked}
        print(json_text({**facts, "set_aside": aside, "leftovers": leftovers}, indent=1))
        return well
    for name in aside:
        say("set aside", f"{name}: a resume found it damaged")
    left = (
        "is being written or deleted"
        if history.in_progress
        else "left half-written; the next start deletes it"
    )
    for name in leftovers:
        say("leftover", f"{name} {left}")
    if not found:
        say(
            "none",
            f"no checkpoint is left in {folder}" if lost else "no checkpoint has been made yet",
        )
    return well


def _checked(found: list[Path], identity: str | None, alone: bool) -> Iterator[Facts]:
    """Yield each checkpoint, the newest first, as soon as it has been read."""
    from llmtrain.record.checkpoint import find_fault, held_out_losses

    losses = held_out_losses(found)
    best = None if alone else min(losses, key=losses.__getitem__, default=None)
    taken = None
    for path in reversed(found):
        number = path.name.removeprefix("step-")
        facts: Facts = {
            "step": int(number) if number.isdecimal() else number,
            "bytes": _bytes(path),
        }
        facts |= {
            "written": _time(path),
            "held_out": losses.get(path),
            "fault": find_fault(path, identity),
        }
        if path.exists():  # a run in progress deletes old ones
            taken = taken or (path if facts["fault"] is None and not alone else None)
            yield facts | {"taken": path == taken, "best": path == best}


def _bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    return 0


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.{int(unit != 'B')}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _time(path: Path) -> str:
    """Return when it was committed, or else when its folder was last changed."""
    for file in (path / "MANIFEST.json", path):
        with contextlib.suppress(OSError):
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.lstat().st_mtime))
    return ""
