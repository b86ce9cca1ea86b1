"""List runs with their state, losses and age; or check the checkpoints of one run.

A check reads each checkpoint, and the model that the run began with if it is in a folder. It
compares their files with their hashes, and changes nothing. The exit status is 0 if all is intact,
and 1 otherwise. With --finished, the exit status is 0 if the run is finished, and 1 otherwise.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.console import note, printable, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import UnreadableError, json_text
from llmtrain.json_types import JsonObject
from llmtrain.quantities import duration_text, size_text
from llmtrain.record.history import History, is_run, runs_in

if TYPE_CHECKING:
    from llmtrain.record.checkpoint import SavedCheckpoint

EXAMPLES = (
    "llmtrain runs",
    "llmtrain runs sweep --sort eval_loss",
    "llmtrain runs check runs/gpt",
    "llmtrain runs --finished runs/gpt && llmtrain generate runs/gpt",
)

_STATES_AFTER_A_SAVE = ("finished", "preempted")  # a run saves a checkpoint before it enters them

# The losses of the list: keys of --json, and the keys of the log entries that have them.
_LOSSES = {"loss": "train/loss", "eval_loss": "eval/loss"}
_SORT_KEYS = ("age", *_LOSSES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "llmtrain runs [FOLDER] [--sort {age,loss,eval_loss}] [--json]\n"
        "       llmtrain runs check RUN [--json]\n"
        "       llmtrain runs --finished RUN [--json]"
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FOLDER",
        help="the folder whose runs are listed (default: runs); or the word check, followed by a "
        "run, its checkpoints folder or a single checkpoint",
    )
    parser.add_argument(
        "--sort",
        choices=_SORT_KEYS,
        default="age",
        help="order of the list: the newest run first (age), or the lowest loss or eval loss first "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--finished",
        metavar="RUN",
        help="print whether this run is finished; the exit status is 0 if it is, and 1 otherwise",
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.finished is not None:
        if arguments.words:
            raise UserError("--finished takes one run: llmtrain runs --finished RUN.")
        sys.exit(0 if _is_finished(Path(arguments.finished), arguments.json) else 1)

    should_check = arguments.words[:1] == ["check"]
    if should_check:
        folders = arguments.words[1:]
    else:
        folders = arguments.words or ["runs"]
    if len(folders) != 1:
        raise UserError("give one folder: llmtrain runs [FOLDER], or llmtrain runs check RUN.")

    path = Path(folders[0])
    try:
        if should_check:
            sys.exit(0 if _check(path, arguments.json) else 1)
        _list(path, sort_key=arguments.sort, as_json=arguments.json)
    except BrokenPipeError:  # an OSError, but not one of the folder: `llmtrain runs | head`
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or path} could not be read: {error.strerror or first_line(error)}."
        ) from None


# --- finished


def _is_finished(path: Path, as_json: bool) -> bool:
    """Print the state of a run, and return whether it is finished."""
    history = History.of_run(path)
    if as_json:
        content = {"run": str(path), "state": history.state, "step": history.step}
        print(json_text(content, indent=1))
    else:
        say("run", f"{path}: {history.summary()}")
    return history.state == "finished"


# --- list


def _list(path: Path, sort_key: str, as_json: bool) -> None:
    """Print the runs in a folder, those with the smallest value of the key first."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name the folder that holds the runs.")

    histories = []
    refusals = []
    for folder in runs_in(path):
        try:
            histories.append(History.of_run(folder))
        except UserError as error:  # another version of llmtrain has written it
            refusals.append(str(error))

    histories.sort(key=_age)
    runs = [_listed(history) for history in histories]
    # Runs without the loss, and those whose loss is NaN, come last; of equal values, the newest
    # comes first.
    runs.sort(key=lambda run: _sort_value(run[sort_key]))
    if not runs and not refusals and not as_json:
        raise UserError(f"{path} contains no runs.")
    for refusal in refusals:
        note(refusal)
    if as_json:
        print(json_text(runs, indent=1))
    elif runs:
        _print_table(runs)


def _age(history: History) -> float:
    """Return the seconds since a run last wrote to its folder."""
    files = [history.folder / name for name in ("metrics.jsonl", "status.json", "run.json")]
    newest = max((path.stat().st_mtime for path in files if path.exists()), default=0.0)
    return max(0.0, time.time() - newest)


def _sort_value(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _listed(history: History) -> JsonObject:
    """Return the values that the list shows for a run."""
    losses = {name: history.latest(key) for name, key in _LOSSES.items()}
    return {
        "run": str(history.folder),
        "state": history.state,
        "step": history.step,
        "max_steps": history.settings.get("max_steps"),
        **losses,
        "age": round(_age(history), 1),
        "lost": history.lost_steps(),
    }


def _print_table(runs: list[JsonObject]) -> None:
    width = max(3, *(len(run["run"]) for run in runs)) + 2
    print(f"{'run':<{width}}{'state':<12}{'step':>15}{'loss':>10}{'eval loss':>10}{'age':>10}")
    for run in runs:
        step = f"{run['step']:,}"
        if run["max_steps"]:
            step += f"/{run['max_steps']:,}"
        losses = ""
        for key in _LOSSES:
            losses += f"{_format_loss(run[key]):>10}"
        age = duration_text(run["age"])
        print(printable(f"{run['run']:<{width}}{run['state']:<12}{step:>15}{losses}{age:>10}"))
    for run in runs:
        for loss in run["lost"]:
            say("lost", f"{run['run']}: {loss}")


# --- check


class _Target(NamedTuple):
    """The checkpoints to check.

    Attributes:
        folder: the run's ``checkpoints`` folder.
        checkpoints: the checkpoints to read, the oldest first.
        is_single: whether the user has named a single checkpoint.
    """

    folder: Path
    checkpoints: list[Path]
    is_single: bool = False


class _CheckedCheckpoint(NamedTuple):
    """The results for one checkpoint.

    Attributes:
        saved: the checkpoint on disk.
        fault: why it cannot be loaded, or ``None`` if it is intact.
        is_resumable: whether a resume would load this one, the newest that is intact.
    """

    saved: "SavedCheckpoint"
    fault: str | None
    is_resumable: bool

    def as_json(self) -> JsonObject:
        return {**self.saved.as_json(), "fault": self.fault, "is_resumable": self.is_resumable}


def _check(path: Path, as_json: bool) -> bool:
    """Print the state of a run and of its checkpoints, and return whether all is well."""
    target = _find_target(path)
    run_folder = target.folder.parent
    history = History.read(run_folder)
    set_aside: list[str] = []
    leftovers: list[str] = []
    if not target.is_single:
        set_aside = _names(target.folder.glob("damaged-*"))
        leftovers = _names([*run_folder.glob(".tmp-*"), *target.folder.glob(".tmp-*")])
    is_lost = not target.checkpoints and _has_saved(history, set_aside)
    summary = history.summary()

    if not as_json:
        say("run", f"{run_folder}: {summary}")
        if target.checkpoints:
            print(f"{'step':>10}{'size':>12}  {'written':<19}{'eval loss':>10}")
    checked = []
    for checkpoint in _read_checkpoints(target, history.record.get("fingerprint_sha256")):
        checked.append(checkpoint)
        if not as_json:
            print(printable(_checkpoint_line(checkpoint)), flush=True)
    changed_model = _changed_model(history)
    is_well = not is_lost and not any(checkpoint.fault for checkpoint in checked)
    is_well = is_well and changed_model is None

    if as_json:
        content = {
            "run": str(run_folder),
            "summary": summary,
            "well": is_well,
            "checkpoints": [checkpoint.as_json() for checkpoint in checked],
            "changed_model": changed_model,
            "set_aside": set_aside,
            "leftovers": leftovers,
        }
        print(json_text(content, indent=1))
        return is_well

    if changed_model is not None:
        say("changed", f"{changed_model} has other weights than the run began with; put those back")
    for name in set_aside:
        say("set aside", f"{name}: a resume found it damaged and renamed it")
    condition = "is incomplete; the next start deletes it"
    if history.is_in_progress:
        condition = "is being written or deleted"
    for name in leftovers:
        say("leftover", f"{name} {condition}")
    if is_lost:
        say("none", f"no checkpoint is left in {target.folder}")
    elif not target.checkpoints:
        say("none", "no checkpoint has been made yet")
    return is_well


def _find_target(path: Path) -> _Target:
    """Find out whether the user has named a checkpoint, a run or its folder ``checkpoints``.

    Raises:
        UserError: if it is none of these.
    """
    from llmtrain.record.checkpoint import MANIFEST, checkpoints

    absolute = path.absolute()  # it has a name even if the path is "."
    is_folder = path.is_dir()
    if is_folder and (absolute.name.startswith("step-") or (path / MANIFEST).exists()):
        return _Target(folder=absolute.parent, checkpoints=[absolute], is_single=True)

    if is_run(path) or (path / "checkpoints").is_dir():
        folder = absolute / "checkpoints"
        return _Target(folder=folder, checkpoints=checkpoints(folder))

    if is_folder and (absolute.name == "checkpoints" or checkpoints(path)):
        return _Target(folder=absolute, checkpoints=checkpoints(absolute))

    raise UserError(f"{path} is neither a run folder nor a checkpoint; name one, such as runs/gpt.")


def _names(paths: Iterable[Path]) -> list[str]:
    return [path.name for path in sorted(paths)]


def _has_saved(history: History, set_aside: list[str]) -> bool:
    """Return whether a run must have saved a checkpoint at some time."""
    state = history.status.get("state")
    if set_aside or state in _STATES_AFTER_A_SAVE:
        return True
    # While a run is running, the step in status.json is that of its latest checkpoint.
    return bool(state == "running" and history.status.get("step"))


def _read_checkpoints(target: _Target, fingerprint: str | None) -> Iterator[_CheckedCheckpoint]:
    """Yield each checkpoint as soon as it has been read, the newest first.

    Args:
        target: the checkpoints to read.
        fingerprint: the fingerprint of the run that the checkpoints must belong to.
    """
    from llmtrain.record.checkpoint import find_fault, saved_checkpoints

    can_resume = not target.is_single
    for saved in saved_checkpoints(target.checkpoints):
        try:
            fault = find_fault(saved.path, fingerprint)
        except UnreadableError as error:
            fault = str(error)
            can_resume = False  # a resume never passes over a checkpoint that may be intact
        # A run in progress may have deleted the checkpoint meanwhile. Then its fault means nothing.
        if not saved.path.exists():
            continue

        is_resumable = can_resume and fault is None
        can_resume = can_resume and not is_resumable
        is_best = saved.is_best and not target.is_single  # others would have to be compared
        yield _CheckedCheckpoint(
            saved=saved._replace(is_best=is_best),
            fault=fault,
            is_resumable=is_resumable,
        )


def _changed_model(history: History) -> str | None:
    """Return the folder of the model that a run began with, if it has other weights now.

    Its files are read even if their hashes are known, so that a disk that returns other bytes is
    noticed.
    """
    fingerprint = history.record.get("fingerprint") or {}
    initial_weights = fingerprint.get("initial_weights") or {}
    sha256 = initial_weights.get("weights", {}).get("sha256")
    name = history.settings.get("model_name_or_path")
    if sha256 is None or name is None or not Path(name).is_dir():
        return None
    from llmtrain.model_folders import is_adapter
    from llmtrain.models.adapters import base_of
    from llmtrain.models.hub_models import origin_of

    if is_adapter(Path(name)):  # it is trained further
        name, _ = base_of(Path(name))
        if not Path(name).is_dir():
            return None
    if origin_of(name, reread=True)["sha256"] == sha256:
        return None
    return str(name)


def _checkpoint_line(checkpoint: _CheckedCheckpoint) -> str:
    saved = checkpoint.saved
    remarks = [checkpoint.fault or "intact"]
    if checkpoint.is_resumable:
        remarks.append("a resume loads this one")
    if saved.is_best:
        remarks.append("best eval loss")

    size = size_text(saved.size)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.written))
    eval_loss = _format_loss(saved.eval_loss)
    numbers = f"{saved.step:>10}{size:>12}  {written:<19}{eval_loss:>10}"
    return f"{numbers}  {'; '.join(remarks)}"


# --- numbers as text


def _format_loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
