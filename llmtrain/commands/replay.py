"""Make one update of a run again from the checkpoint before it, and show its rows by their loss.

On a CPU, or with --bitwise, it is the same bit for bit. The recipe is started that the run was started with; the run's
own folder is not touched. With --json all of its rows are printed.
"""

import argparse
import json
import math
import re
import tempfile
import time
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.launching.children import command_of, run_to_end
from llmtrain.record.history import History, read_lines
from llmtrain.types import Facts

_WIDTH = 80  # characters of a row's text
_COMPARED = {
    "batch": "tokens and labels",
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "train/weight_norm": "weights after it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--step", type=int, required=True, metavar="K", help="the update; the first of a run is 1"
    )
    parser.add_argument(
        "--rows", type=int, default=10, metavar="N", help="that are shown (default: %(default)s)"
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config of the run, where it was sharded"
    )


def run(arguments: argparse.Namespace) -> None:
    history = History.of(Path(arguments.run_folder))
    step = arguments.step
    # A run that failed may have done so in the step after its last one: that one can be repeated.
    last = history.step if history.state == "finished" else history.step + 1
    if not 1 <= step <= last:
        raise UserError(f"--step {step}: this run has made updates 1 to {history.step}.")
    start = _start_that_made(history, step)

    source, from_step = _before(history, step)
    with tempfile.TemporaryDirectory(prefix="llmtrain-replay-") as scratch:
        repeated = Path(scratch) / "run"
        forced = {
            "replay_step": step,
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": repeated,
            "resume_from_checkpoint": source,
        }
        began = time.monotonic()
        _launch(history.folder, start, arguments.config_file, forced)
        seconds = time.monotonic() - began
        if not (repeated / "replay.json").exists():
            raise UserError(
                f"the recipe ended before update {step}; start it by hand with --replay_step {step}."
            )
        rows = json.loads((repeated / "replay.json").read_text())["rows"]
        now = _reading(read_lines(repeated / "metrics.jsonl"), step)
    assert now is not None, "a replay logs every step"

    rows.sort(key=lambda row: -math.inf if math.isnan(row["loss"]) else -row["loss"])
    _add_text(rows, history.folder)
    then = _reading(history.readings, step)
    if arguments.json:
        same = None if then is None else not _differences(then, now)
        print(json_text({"step": step, "from": from_step, "same": same, "rows": rows}, indent=1))
        return

    print(f"update    {step}, made again from step {from_step} in {seconds:.1f} s")
    print(_comparison(then, now))
    print(f"{'row':>10}{'loss':>10}{'tokens':>8}  text")
    for row in rows[: arguments.rows]:
        text = json.dumps(row["text"], ensure_ascii=False)[:_WIDTH]
        print(f"{row['row']:>10}{row['loss']:>10.4f}{row['targets']:>8}  {text}")


def _start_that_made(history: History, step: int) -> Facts:
    """Return the entry of ``run.json`` for the start that made a step."""
    starts = [start for start in history.starts if start["step"] < step]
    if not starts or not starts[-1]["command"]:  # a notebook has no command
        raise UserError(f"{history.folder}/run.json does not say how the run was started.")
    return starts[-1]


def _differences(then: Facts, now: Facts) -> list[str]:
    """Return the compared keys whose values differ."""
    return [key for key in _COMPARED if key in then and then[key] != now[key]]


def _comparison(then: Facts | None, now: Facts) -> str:
    """Return the line that says whether the repeated step is the same."""
    if then is None:
        return "compared  with nothing: the run has no reading of it (--logging_steps)"
    differing = _differences(then, now)
    if differing:
        parts = [f"{_COMPARED[key]}: {then[key]} then, {now[key]} now" for key in differing]
        return "differs   " + "; ".join(parts)
    names = ", ".join(name for key, name in _COMPARED.items() if key in then)
    return f"the same  {names}: to the last bit"


def _add_text(rows: list[Facts], folder: Path) -> None:
    from llmtrain.models.generation import model_folder, tokenizer_of

    try:
        tokenizer = tokenizer_of(model_folder(str(folder)))
    except UserError:  # no checkpoint has been made yet
        tokenizer = None
    for row in rows:
        tokens = row.pop("tokens")
        row["text"] = (
            tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
        )


def _reading(lines: list[Facts], step: int) -> Facts | None:
    return next((line for line in lines if line["step"] == step and "train/loss" in line), None)


def _before(history: History, step: int) -> tuple[str, int]:
    """Return the checkpoint to repeat a step from, and the checkpoint's step.

    It is the newest whole checkpoint before the step, or else the one that the run began with. The
    first value is what ``--resume_from_checkpoint`` takes.
    """
    from llmtrain.record.checkpoint import checkpoints, find_fault

    origin = history.starts[0]["from"]
    candidates = list(reversed(checkpoints(history.folder / "checkpoints")))
    if origin:
        candidates.append(Path(origin))
    for path in candidates:
        at = int(path.name.removeprefix("step-")) if path.name.startswith("step-") else step
        if at < step and path.is_dir() and find_fault(path) is None:
            return str(path.absolute()), at

    if origin:
        raise UserError(f"no checkpoint before update {step} is left: the run began with {origin}.")
    return "never", 0


def _launch(folder: Path, start: Facts, config_file: str | None, forced: Facts) -> None:
    """Start a run's recipe again, with its flags and then those that are forced."""
    recipe, *flags = start["command"]
    if not Path(recipe).is_file():
        raise UserError(
            f"{recipe} is not here; go to the folder on {start['host']} in which the run was started."
        )
    if Path(recipe).resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{recipe} lies in the run's own folder, and would be run: copy it out of there if you "
            "trust it."
        )
    if config_file is None and _has_shards(start["sharded"]):
        raise UserError(
            f"this run was sharded ({start['sharded']}): give its accelerate config with --config_file."
        )

    variables = {
        "ACCELERATE_MIXED_PRECISION": start["mixed_precision"],
        "OMP_NUM_THREADS": str(start["threads"]),
    }
    command = command_of([recipe, *flags], forced, start["processes"], config_file)
    on_cpu = start["device"] == "cpu" and config_file is None
    run_to_end(command, on_cpu, **variables)


def _has_shards(sharded: str | None) -> bool:
    """Return whether a layout, replicas x shards (x tensor), splits the model."""
    layout = re.match(r"\d+x(\d+)(?:x(\d+))?", sharded or "")
    return layout is not None and (int(layout[1]) > 1 or layout[2] is not None)
