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

from llmtrain.contract import Facts
from llmtrain.errors import UserError, require
from llmtrain.files import json_text
from llmtrain.launching.children import command_of, run_to_end
from llmtrain.record.history import History, read_lines

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
    history, step = History.of(Path(arguments.run_folder)), arguments.step
    last = history.step + (
        history.state != "finished"
    )  # the update that ended it may be the one to look at
    require(1 <= step <= last, f"--step {step}: this run has made updates 1 to {history.step}.")
    start: Facts = next((start for start in reversed(history.starts) if start["step"] < step), {})
    require(
        start.get("command"), f"{history.folder}/run.json does not say how the run was started."
    )
    source, from_step = _before(history, step)
    with tempfile.TemporaryDirectory(prefix="llmtrain-replay-") as scratch:
        again, began = Path(scratch) / "run", time.monotonic()
        forced = {"replay_step": step, "logging_steps": 1, "report_to": "none", "output_dir": again}
        _launch(
            history.folder,
            start,
            arguments.config_file,
            forced | {"resume_from_checkpoint": source},
        )
        seconds = time.monotonic() - began
        if not (again / "replay.json").exists():
            raise UserError(
                f"the recipe ended before update {step}; start it by hand with --replay_step {step}."
            )
        rows = json.loads((again / "replay.json").read_text())["rows"]
        now = _reading(read_lines(again / "metrics.jsonl"), step)
    then = _reading(history.readings, step)
    assert now is not None, "a replay logs every update"
    compared = {key: (then[key], now[key]) for key in _COMPARED if then is not None and key in then}
    differing = [key for key, (first, second) in compared.items() if first != second]
    rows.sort(key=lambda row: -math.inf if math.isnan(row["loss"]) else -row["loss"])
    _add_text(rows, history.folder)
    if arguments.json:
        same = None if then is None else not differing
        print(json_text({"step": step, "from": from_step, "same": same, "rows": rows}, indent=1))
        return
    print(f"update    {step}, made again from step {from_step} in {seconds:.1f} s")
    if then is None:
        print("compared  with nothing: the run has no reading of it (--logging_steps)")
    elif differing:
        told = (
            f"{_COMPARED[key]}: {compared[key][0]} then, {compared[key][1]} now"
            for key in differing
        )
        print("differs   " + "; ".join(told))
    else:
        print(f"the same  {', '.join(_COMPARED[key] for key in compared)}: to the last bit")
    print(f"{'row':>10}{'loss':>10}{'tokens':>8}  text")
    for row in rows[: arguments.rows]:
        text = json.dumps(row["text"], ensure_ascii=False)[:_WIDTH]
        print(f"{row['row']:>10}{row['loss']:>10.4f}{row['targets']:>8}  {text}")


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
    """Return what ``--resume_from_checkpoint`` takes to begin at the newest checkpoint before an update, and its step.

    The checkpoint with which the run itself began counts, too.
    """
    from llmtrain.record.checkpoint import checkpoints, find_fault

    origin = history.starts[0].get("from")
    for path in [
        *reversed(checkpoints(history.folder / "checkpoints")),
        *([Path(origin)] if origin else []),
    ]:
        at = int(path.name.removeprefix("step-")) if path.name.startswith("step-") else step
        if at < step and path.is_dir() and find_fault(path) is None:
            return str(path.absolute()), at
    require(not origin, f"no checkpoint before update {step} is left: the run began with {origin}.")
    return "never", 0


def _launch(folder: Path, start: Facts, config_file: str | None, forced: Facts) -> None:
    recipe, *flags = start["command"]
    if not Path(recipe).is_file():
        raise UserError(
            f"{recipe} is not here; go to the folder on {start.get('host')} in which the run was started."
        )
    own = Path(recipe).resolve().is_relative_to(folder.resolve())
    require(
        not own,
        f"{recipe} lies in the run's own folder, and would be run: copy it out of there if you trust it.",
    )
    shares = re.match(
        r"\d+x(\d+)(?:x(\d+))?", start.get("sharded") or ""
    )  # replicas, shards, shards of matrices
    if config_file is None and shares is not None and (int(shares[1]) > 1 or shares[2]):
        raise UserError(
            f"this run was sharded ({start['sharded']}): give its accelerate config with --config_file."
        )
    variables = {
        "ACCELERATE_MIXED_PRECISION": start["mixed_precision"],
        "OMP_NUM_THREADS": str(start["threads"]),
    }
    command = command_of([recipe, *flags], forced, start["processes"], config_file)
    run_to_end(command, start["device"] == "cpu" and config_file is None, **variables)
