"""Repeat one step of a run from an earlier checkpoint, and list its rows by loss.

On a CPU, or with --bitwise, the repeated step has the same bits. The command executes the recipe
with which the run was started, and does not change the run folder. With --json, it prints all rows.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from llmtrain.console import labelled, printable
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.json_types import JsonObject
from llmtrain.launching.children import recipe_command, run_command
from llmtrain.record.history import History, read_lines

EXAMPLES = ("llmtrain replay runs/gpt --step 10",)

_TEXT_WIDTH = 80  # characters of a row's text

# Keys of a log entry that must be equal in the run and in the repeated step, and their names.
_COMPARED = {
    "batch": "tokens and labels",
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "train/weight_norm": "weights after it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--step",
        type=int,
        required=True,
        metavar="K",
        help="the step to repeat; the first step of a run is 1",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=10,
        metavar="N",
        help="list the N rows with the highest loss (default: %(default)s)",
    )
    parser.add_argument(
        "--config_file",
        metavar="FILE",
        help="the run's accelerate config; required if the run was sharded",
    )


def run(arguments: argparse.Namespace) -> None:
    history = History.of_run(Path(arguments.run_folder))
    step = arguments.step
    # A run that has failed may have failed in the step after its last one, so that one is allowed.
    last = history.step if history.state == "finished" else history.step + 1
    if not 1 <= step <= last:
        raise UserError(
            f"--step {step} is out of range: this run has made steps 1 to {history.step}."
        )

    if step <= history.extends.get("step", 0):
        earlier_run = history.extends["run"]
        raise UserError(
            f"--step {step} was made by {earlier_run}, which this run extends; repeat it there: "
            f"llmtrain replay {earlier_run} --step {step}"
        )
    start = _start_that_made(history, step)
    origin = _find_origin(history, step)
    repeated = _repeat(
        step,
        run_folder=history.folder,
        start=start,
        origin=origin,
        config_file=arguments.config_file,
    )

    rows = repeated.rows
    # JSON has null for a loss that is not finite. Such rows are the first to look at.
    rows.sort(key=lambda row: -math.inf if row["loss"] is None else -row["loss"])
    _replace_tokens_by_text(rows, history.folder)
    logged = _find_entry(history.entries, step)

    if arguments.json:
        is_same = None if logged is None else not _differing_keys(logged, repeated.entry)
        content = {"step": step, "from": origin.step, "same": is_same, "rows": rows}
        print(json_text(content, indent=1))
        return

    text = f"{step}, repeated from step {origin.step} in {repeated.seconds:.1f} s"
    print(labelled("step", text))
    print(_comparison_line(logged, repeated.entry))
    print(f"{'row':>10}{'loss':>10}{'tokens':>8}  text")
    for row in rows[: arguments.rows]:
        text = printable(json_text(row["text"], ensure_ascii=False))[:_TEXT_WIDTH]
        loss = math.nan if row["loss"] is None else row["loss"]
        print(f"{row['row']:>10}{loss:>10.4f}{row['targets']:>8}  {text}")


# --- the origin of the step


class _Origin(NamedTuple):
    """The state of the run from which a step is repeated.

    Attributes:
        checkpoint: a value for ``--resume_from_checkpoint``.
        step: the step of this checkpoint.
    """

    checkpoint: str
    step: int


def _start_that_made(history: History, step: int) -> JsonObject:
    """Return the entry in ``run.json`` about the start of the run that made a step."""
    starts = [start for start in history.starts if start["step"] < step]
    # A run that was started in a notebook has no command.
    if not starts or not starts[-1]["command"]:
        raise UserError(f"{history.folder}/run.json does not say how the run was started.")
    return starts[-1]


def _find_origin(history: History, step: int) -> _Origin:
    """Return the newest intact checkpoint before a step, or the state in which the run began."""
    from llmtrain.record.checkpoint import checkpoints, find_fault

    first_checkpoint = history.starts[0]["from"]
    candidates = list(reversed(checkpoints(history.folder / "checkpoints")))
    if first_checkpoint:
        candidates.append(_directory_of(history.starts[0]) / first_checkpoint)
    for path in candidates:
        if not path.name.startswith("step-"):
            continue
        checkpoint_step = int(path.name.removeprefix("step-"))
        if checkpoint_step < step and path.is_dir() and find_fault(path) is None:
            return _Origin(checkpoint=str(path.absolute()), step=checkpoint_step)

    if first_checkpoint:
        raise UserError(
            f"no checkpoint before step {step} is left: the run started from {first_checkpoint}."
        )
    return _Origin(checkpoint="never", step=0)


# --- repeating the step


class _RepeatedStep(NamedTuple):
    """The results of the repeated step.

    Attributes:
        rows: its rows, each with its number, its loss, its target tokens and all its tokens.
        entry: its log entry.
        seconds: how long the recipe took.
    """

    rows: list[JsonObject]
    entry: JsonObject
    seconds: float


def _repeat(
    step: int, *, run_folder: Path, start: JsonObject, origin: _Origin, config_file: str | None
) -> _RepeatedStep:
    """Repeat a step in a temporary folder.

    Args:
        step: the step.
        run_folder: the folder of the run that made it.
        start: the entry in ``run.json`` about the start that made it.
        origin: where to begin.
        config_file: the run's accelerate config, if it needs one.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-replay-") as scratch:
        folder = Path(scratch) / "run"
        flags = {
            "replay_step": step,
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": folder,
            "resume_from_checkpoint": origin.checkpoint,
        }
        began = time.monotonic()
        _launch(start, flags, run_folder=run_folder, config_file=config_file)
        seconds = time.monotonic() - began

        replay_file = folder / "replay.json"
        if not replay_file.exists():
            raise UserError(
                f"the recipe ended before step {step}; to see why, start it yourself with "
                f"--replay_step {step}."
            )
        rows = json.loads(replay_file.read_text())["rows"]
        entry = _find_entry(read_lines(folder / "metrics.jsonl"), step)
    assert entry is not None, "a replay logs every step"
    return _RepeatedStep(rows=rows, entry=entry, seconds=seconds)


def _launch(
    start: JsonObject, flags: JsonObject, *, run_folder: Path, config_file: str | None
) -> None:
    """Execute a recipe as it was started before, with flags that override the earlier ones."""
    recipe, *recipe_flags = start["command"]
    # Its paths may be relative to the folder in which the run was started.
    directory = _directory_of(start)
    if not (directory / recipe).is_file():
        directory = Path.cwd()
    if not (directory / recipe).is_file():
        raise UserError(
            f"{recipe} does not exist here; change to the folder on {start['host']} in which the "
            "run was started."
        )
    if (directory / recipe).resolve().is_relative_to(run_folder.resolve()):
        raise UserError(
            f"{recipe} is inside the run folder, and this command would execute it; if you trust "
            "it, copy it to another folder."
        )
    if config_file is None and start["sharded"] is not None:
        raise UserError(
            f"this run was sharded ({start['sharded']}); pass its accelerate config with "
            "--config_file."
        )

    if config_file is not None:
        config_file = str(Path(config_file).absolute())
    command = recipe_command([recipe, *recipe_flags], flags, start["processes"], config_file)
    on_cpu = start["device"] == "cpu" and config_file is None
    variables = {
        "ACCELERATE_MIXED_PRECISION": start["mixed_precision"],
        "OMP_NUM_THREADS": str(start["threads"]),
    }
    run_command(command, on_cpu, directory, **variables)


def _directory_of(start: JsonObject) -> Path:
    """Return the folder in which a run was started."""
    return Path(start.get("directory") or Path.cwd())


# --- comparing and showing the step


def _find_entry(entries: list[JsonObject], step: int) -> JsonObject | None:
    """Return the log entry with the train metrics of a step, if there is one."""
    for entry in entries:
        if entry["step"] == step and "train/loss" in entry:
            return entry
    return None


def _differing_keys(logged: JsonObject, repeated: JsonObject) -> list[str]:
    """Return the compared keys whose values differ, among those that the run has logged."""
    return [key for key in _COMPARED if key in logged and logged[key] != repeated[key]]


def _comparison_line(logged: JsonObject | None, repeated: JsonObject) -> str:
    """Return the line that says whether the repeated step is the same.

    Args:
        logged: the log entry of the run, or ``None`` if it has not logged this step.
        repeated: the log entry of the repeated step.
    """
    if logged is None:
        text = "the run has not logged this step, see --logging_steps: nothing to compare"
        return labelled("unknown", text)

    differing = _differing_keys(logged, repeated)
    if differing:
        parts = [
            f"{_COMPARED[key]}: {logged[key]} in the run, {repeated[key]} now" for key in differing
        ]
        return labelled("differs", "; ".join(parts))

    names = ", ".join(name for key, name in _COMPARED.items() if key in logged)
    return labelled("same", f"{names}: to the last bit")


def _replace_tokens_by_text(rows: list[JsonObject], run_folder: Path) -> None:
    """Replace each row's tokens with their text; without a tokenizer, with their numbers."""
    from llmtrain.model_folders import model_folder, tokenizer_of

    try:
        tokenizer = tokenizer_of(model_folder(str(run_folder)))
    except UserError:  # no checkpoint yet, or no tokenizer in it
        tokenizer = None

    for row in rows:
        tokens = row.pop("tokens")
        if tokenizer is None:
            row["text"] = " ".join(str(token) for token in tokens)
        else:
            row["text"] = tokenizer.decode(tokens)
