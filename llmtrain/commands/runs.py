"""List runs with their state, losses and age; or check the checkpoints of one run.

A check reads each checkpoint and compares its files with their hashes. It changes nothing. The exit
status is 0 if all is intact, and 1 otherwise. With --finished, the exit status is 0 if the run is
finished, and 1 otherwise.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.console import duration_text, note, printable, say, size_text
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, UnreadableError, json_text, local_path
from llmtrain.record.history import History, is_run, runs_in
from llmtrain.storage import Storage, is_address

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
        help="the folder or address whose runs are listed (default: runs); or the word check, "
        "followed by a run folder",
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
        if arguments.words or arguments.sort != "age":
            raise UserError(
                "--finished takes one run, and no --sort: llmtrain runs --finished RUN."
            )
        history = History.at(arguments.finished)
        if arguments.json:
            content = {"run": arguments.finished, "state": history.state, "step": history.step}
            print(json_text(content, indent=1))
        else:
            say("run", f"{arguments.finished}: {history.summary()}")
        sys.exit(0 if history.state == "finished" else 1)

    should_check = arguments.words[:1] == ["check"]
    if should_check:
        folders = arguments.words[1:]
    else:
        folders = arguments.words or ["runs"]
    if len(folders) != 1:
        raise UserError("give one folder: llmtrain runs [FOLDER], or llmtrain runs check RUN.")

    path = Path(local_path(folders[0]) if should_check else folders[0])
    try:
        if should_check:
            sys.exit(0 if _check(path, arguments.json) else 1)
        _list(folders[0], sort_key=arguments.sort, as_json=arguments.json)
    except BrokenPipeError:  # an OSError, but not one of the folder: `llmtrain runs | head`
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or path} could not be read: {error.strerror or first_line(error)}."
        ) from None


# --- list


def _list(place: str, sort_key: str, as_json: bool) -> None:
    """Print the runs in a folder or at an address.

    Those with the smallest value of the key come first.
    """
    if is_address(place):
        files = Storage(place).sizes()
        folders = [name.rpartition("/")[0] for name in files if Path(name).name == "run.json"]
        names = [f"{place.rstrip('/')}/{folder}".rstrip("/") for folder in sorted(folders)]
    elif Path(place).is_dir():
        names = [str(folder) for folder in runs_in(Path(place))]
    else:
        raise UserError(f"{place} is not a folder; name the folder that holds the runs.")

    runs: list[JsonObject] = []
    refusals = []
    for name in names:
        try:
            history = History.at(name)
        except UserError as error:  # another version of llmtrain has written it
            refusals.append(str(error))
            continue
        losses = {loss: history.latest(key) for loss, key in _LOSSES.items()}
        run = {
            "run": name,
            "state": history.state,
            "step": history.step,
            "max_steps": history.settings.get("max_steps"),
            **losses,
            "age": round(max(0.0, time.time() - history.time), 1),
        }
        runs.append(run)

    # Runs without the loss, and those whose loss is NaN, come last; of equal values, the newest
    # comes first.
    runs.sort(key=lambda run: run["age"])
    runs.sort(key=lambda run: _sort_value(run[sort_key]))
    if not runs and not refusals and not as_json:
        raise UserError(f"{place} contains no runs.")
    for refusal in refusals:
        note(refusal)
    if as_json:
        print(json_text(runs, indent=1))
    elif runs:
        _print_table(runs)


def _sort_value(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _print_table(runs: list[JsonObject]) -> None:
    width = max(3, *(len(run["run"]) for run in runs)) + 2
    print(f"{'run':<{width}}{'state':<12}{'step':>15}{'loss':>10}{'eval loss':>10}{'age':>10}")
    for run in runs:
        step = f"{run['step']:,}"
        if run["max_steps"]:
            step += f"/{run['max_steps']:,}"
        losses = "".join(f"{_format_loss(run[key]):>10}" for key in _LOSSES)
        age = duration_text(run["age"])
        print(printable(f"{run['run']:<{width}}{run['state']:<12}{step:>15}{losses}{age:>10}"))


# --- check


def _check(path: Path, as_json: bool) -> bool:
    """Print the state of a run and of its checkpoints, and return whether all is well."""
    from llmtrain.record.checkpoint import checkpoints

    folder = path / "checkpoints"
    if not is_run(path) and not folder.is_dir():
        raise UserError(f"{path} is not a run folder; name one, such as runs/gpt.")
    history = History.read(path)
    saved = checkpoints(folder)
    set_aside = sorted(damaged.name for damaged in folder.glob("damaged-*"))
    # While a run is running, the step in status.json is that of its latest checkpoint.
    state = history.status.get("state")
    has_saved = state in _STATES_AFTER_A_SAVE or (state == "running" and history.status.get("step"))
    is_lost = not saved and bool(set_aside or has_saved)
    summary = history.summary()

    if not as_json:
        say("run", f"{path}: {summary}")
        if saved:
            print(f"{'step':>10}{'size':>12}  {'written':<19}{'eval loss':>10}")
    checked = []
    for checkpoint in _read_checkpoints(saved, history.record.get("fingerprint_sha256")):
        checked.append(checkpoint)
        if not as_json:
            print(printable(_checkpoint_line(checkpoint)), flush=True)
    is_well = not is_lost and not any(checkpoint["fault"] for checkpoint in checked)

    if as_json:
        content = {
            "run": str(path),
            "summary": summary,
            "well": is_well,
            "checkpoints": checked,
            "set_aside": set_aside,
        }
        print(json_text(content, indent=1))
        return is_well

    for name in set_aside:
        say("set aside", f"{name}: a resume found it damaged and renamed it")
    if is_lost:
        say("none", f"no checkpoint is left in {folder}")
    elif not saved:
        say("none", "no checkpoint has been made yet")
    return is_well


def _read_checkpoints(paths: list[Path], fingerprint: str | None) -> Iterator[JsonObject]:
    """Yield each checkpoint as soon as it has been read, the newest first.

    Args:
        paths: the checkpoints, the oldest first.
        fingerprint: the fingerprint of the run that the checkpoints must belong to.

    Yields:
        The checkpoint, and its ``fault``: why it cannot be loaded, or ``None`` if it is intact. It
        ``is_resumable`` if a resume would load this one, the newest that is intact.
    """
    from llmtrain.record.checkpoint import find_fault, saved_checkpoints

    can_resume = True
    for path, description in saved_checkpoints(paths):
        try:
            fault = find_fault(path, fingerprint)
        except UnreadableError as error:
            fault = str(error)
            can_resume = False  # a resume never passes over a checkpoint that may be intact
        # A run in progress may have deleted the checkpoint meanwhile. Then its fault means nothing.
        if not path.exists():
            continue

        is_resumable = can_resume and fault is None
        can_resume = can_resume and not is_resumable
        yield {**description, "fault": fault, "is_resumable": is_resumable}


def _checkpoint_line(checkpoint: JsonObject) -> str:
    remarks = [checkpoint["fault"] or "intact"]
    if checkpoint["is_resumable"]:
        remarks.append("a resume loads this one")
    if checkpoint["is_best"]:
        remarks.append("best eval loss")

    size = size_text(checkpoint["size"])
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint["written"]))
    eval_loss = _format_loss(checkpoint["eval_loss"])
    numbers = f"{checkpoint['step']:>10}{size:>12}  {written:<19}{eval_loss:>10}"
    return f"{numbers}  {'; '.join(remarks)}"


def _format_loss(loss: float | None) -> str:
    if loss is None:
        return ""
    # A loss that has exploded stays in its column.
    return f"{loss:.4f}" if abs(loss) < 10_000 else f"{loss:.2e}"
