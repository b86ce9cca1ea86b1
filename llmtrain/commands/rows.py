"""Print the rows of a step, of a run or a recipe, or of a set, as text with marked targets.

Each row of a run has its nll under the run's model, if the run minimises the nll. The rows of a
recipe are those that it would train on with these flags. Nothing is trained.
"""

import argparse
import contextlib
import io
import random
import shlex
import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.console import labelled, note, pluralize, printable, say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, cache_folder, json_text
from llmtrain.interfaces.batches import IGNORED, PADDING_CODE, is_second
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe
from llmtrain.record.history import History, is_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from llmtrain.data.tokenized import Tokenized

# How target tokens are shown.
_TARGETS = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{}\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
)

EXAMPLES = (
    "llmtrain rows runs/gpt --step 10",
    "llmtrain rows runs/finetune --random 10 --checkpoint step-00000100",
    "llmtrain rows recipes/finetune.py --dataset chats.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(
        parser,
        "a run folder, or that of a set; or the path of a recipe, which gets all flags not listed "
        "here",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="print the rows of this step (default: 1, the first)"
    )
    parser.add_argument("--row", type=int, metavar="I", help="print the row with this number")
    parser.add_argument("--random", type=int, metavar="N", help="print N random rows")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="the checkpoint under which the nll is computed, such as step-00000100 "
        "(default: the finished model, or else the newest checkpoint)",
    )


def run(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.recipe)
    given = [name for name in ("step", "row", "random") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} exclude each other; leave one out.")
    step = arguments.step if given else 1
    from llmtrain.data.config import DataConfig
    from llmtrain.data.remote_sets import open_set
    from llmtrain.data.sources import is_set

    history = model = None
    if not folder.is_dir() and not is_set(arguments.recipe):
        check_recipe(arguments.recipe)
        if arguments.checkpoint is not None:
            raise UserError(f"--checkpoint is for a run, and {folder} is a recipe.")
        data = _data_of_recipe(arguments.recipe, arguments.flags, step)
    elif arguments.flags:
        raise UserError(f"{arguments.flags[0]} is for a recipe, and {folder} is a folder.")
    elif is_set(arguments.recipe):
        if arguments.step is not None or arguments.checkpoint is not None:
            raise UserError(f"{folder} is a set, which has no steps; use --row or --random.")
        rows = open_set(arguments.recipe, "rows", DataConfig(dataset=[]))
        data = _Data(rows, global_batch_size=0, seed=0)
        step = None
        arguments.row = arguments.row if given else 0
    else:
        history = History.of_run(folder)
        model = _model_of(history, arguments.checkpoint)
        if step is not None:
            history = _run_that_made(history, step)
        data = _data_of_run(history, step)

    proof = ""
    if step is not None:
        numbers, proof = _rows_of_step(data, step, history)
    else:
        numbers = _numbered_rows(arguments, count=len(data.rows.train))
    _print(data.rows, numbers, model=model, proof=proof, as_json=arguments.json)


# --- the rows


def _numbered_rows(arguments: argparse.Namespace, count: int) -> list[int]:
    """Return the numbers of ``--row`` or ``--random``, if there are ``count`` rows."""
    if arguments.row is None:
        if arguments.random < 1:
            raise UserError(f"--random {arguments.random} is out of range: print at least one row.")
        return random.sample(range(count), min(arguments.random, count))
    if not 0 <= arguments.row < count:
        raise UserError(f"--row {arguments.row}: no such row; the rows are 0 to {count - 1:,}.")
    return [arguments.row]


class _Data(NamedTuple):
    """The training rows of a run, and what their order depends on."""

    rows: "Tokenized"
    global_batch_size: int
    seed: int


def _run_that_made(history: History, step: int) -> History:
    """Return the run that made a step: this one, or one that it extends.

    Raises:
        UserError: if no run has made it.
    """
    # A run that has failed may have failed in the step after its last one, so that one is allowed.
    last = history.step if history.state == "finished" else history.step + 1
    if not 1 <= step <= last:
        raise UserError(
            f"--step {step} is out of range: this run has made steps 1 to {history.step}."
        )
    while step <= history.extends.get("step", 0):
        folder = Path(history.extends["run"])
        if not is_run(folder) and history.starts:  # the path may be relative to another folder
            folder = Path(history.starts[0].get("directory", "")) / folder
        history = History.of_run(folder)
    return history


def _data_of_run(history: History, step: int | None) -> _Data:
    """Return the rows of a run, from the cache; of a step in a round, the rows of that round.

    Raises:
        UserError: if they are not there. The message has a command that makes them again.
    """
    from llmtrain.data.config import DataConfig
    from llmtrain.data.order import WINDOW
    from llmtrain.data.remote_sets import open_set
    from llmtrain.data.sources import is_set
    from llmtrain.data.tokenized import Tokenized

    fingerprint = _fingerprint_of(history)
    # The name is empty if the recipe made its rows itself.
    name = str(history.record.get("cache_entry", ""))
    mixture = fingerprint["mixture"]
    rounds = fingerprint.get("rounds")
    if rounds and step is not None:
        steps = -(-rounds["prompts_per_round"] // fingerprint["global_batch_size"])
        name = str(history.folder / "rounds" / f"round-{(step - 1) // steps + 1:04}")
        mixture = []
    entry = cache_folder() / Path(name).name
    try:
        if is_set(name):
            rows = open_set(name, "rows", DataConfig(dataset=[]))
        else:
            rows = Tokenized.open(entry)
    except OSError:
        command = shlex.join((history.starts or [{}])[-1].get("command") or ["RECIPE"])
        raise UserError(
            f"the rows of {history.folder} are not in the cache ({entry}); llmtrain rows {command} "
            "makes them again, and prints those of a step with --step."
        ) from None
    window = history.settings.get("shuffle_window", WINDOW)
    rows = rows.ordered(mixture, window)
    return _Data(rows, fingerprint["global_batch_size"], fingerprint["seed"])


def _fingerprint_of(history: History) -> JsonObject:
    """Return the fingerprint of a run.

    Raises:
        UserError: if ``run.json`` has none.
    """
    fingerprint: JsonObject = history.record.get("fingerprint") or {}
    if not {"mixture", "global_batch_size", "seed", "objective"} <= fingerprint.keys():
        raise UserError(f"{history.folder}/run.json does not say which rows the run has.")
    return fingerprint


def _data_of_recipe(recipe: str, flags: list[str], step: int | None) -> _Data:
    """Return the rows that a recipe would train on with these flags."""
    from llmtrain.training.recipe_model import build_recipe_model

    planned = build_recipe_model(recipe, flags, "no")
    settings = planned.settings
    last = settings.optim.max_steps
    if step is not None and not 1 <= step <= last:
        raise UserError(f"--step {step} is out of range: the run makes steps 1 to {last}.")
    return _Data(planned.rows, settings.data.global_batch_size, settings.optim.seed)


def _rows_of_step(data: _Data, step: int, history: History | None) -> tuple[list[int], str]:
    """Return the numbers of the rows of a step, and a line that says so if the run has logged them.

    Args:
        data: the rows.
        step: the step.
        history: the run that made it, if there is one.

    Raises:
        UserError: if they differ from those whose fingerprint the run has logged.
    """
    from llmtrain.data.loader import train_loader

    rows = data.rows
    (batch,) = train_loader(
        rows.train,
        data.global_batch_size,
        micro_batch=data.global_batch_size,
        steps=range(step - 1, step),
        seed=None if rows.in_order else data.seed,
        mixture=rows.mixture,
        window=rows.window,
    )
    numbers = [number for number in batch.rows.tolist() if number >= 0]  # -1 is padding
    entries = [] if history is None else history.entries
    logged = {entry["step"]: entry["batch"] for entry in entries if "batch" in entry}.get(step)
    if logged is None:
        return numbers, ""

    fingerprint = f"{batch.token_fingerprint:x}-{batch.label_fingerprint:x}"
    if logged != fingerprint:
        raise UserError(
            f"these are not the rows of step {step}: their fingerprint is {fingerprint}, and "
            f"metrics.jsonl has {logged}; the file or the cache was changed."
        )
    return numbers, labelled("same", f"step {step} had these rows: metrics.jsonl has {logged}, too")


# --- their nll


def _model_of(history: History, checkpoint: str | None) -> str | None:
    """Return the model folder under which the nll is computed; ``None`` if there is none.

    Raises:
        UserError: if there is no such checkpoint.
    """
    from llmtrain.model_folders import model_folder

    folder = history.folder.absolute()
    model = None
    if checkpoint is not None:
        model = model_folder(str(folder / "checkpoints" / Path(checkpoint).name))
    else:
        with contextlib.suppress(UserError):  # no model yet
            model = model_folder(str(folder))
    objective = _fingerprint_of(history)["objective"] or {}
    return model if objective.get("class") == "Objective" else None


def _nlls(rows: "Tokenized", numbers: list[int], model: str) -> list[float]:
    """Return the mean nll per target token of each row under a model, in float32.

    Raises:
        UserError: if the model cannot be loaded.
    """
    import torch

    import llmtrain as lt
    from llmtrain.data.loader import LocalBatches
    from llmtrain.data.order import Slot
    from llmtrain.launching.accelerator import start_accelerator
    from llmtrain.model_folders import is_adapter
    from llmtrain.parallel.placement import move_to_devices

    config = lt.ModelConfig(model_name_or_path=model, continue_adapter=is_adapter(Path(model)))
    config.set(max_length=rows.metadata.block_size)
    accelerator = start_accelerator()
    bundle = move_to_devices(
        accelerator.ranks, lt.load_model(config, None, rows, seed=0, precision="no")
    )
    trained = bundle.model.float().eval()
    batches = LocalBatches(rows.train, micro_batch=1, prepare=bundle.prepare_batch)
    slots = [Slot(position=0, row=number) for number in numbers]
    batch = batches.__getitems__(slots).to(accelerator.device)
    with torch.no_grad():
        sums = [bundle.objective.loss(trained, one, {}).loss.item() for one in batch.batches]
    return [nll / max(count, 1) for nll, count in zip(sums, batch.targets.tolist(), strict=True)]


# --- printing


def _print(
    rows: "Tokenized", numbers: list[int], model: str | None, proof: str, as_json: bool
) -> None:
    nlls: Sequence[float | None] = [None] * len(numbers)
    if model is not None:
        say("nll", f"loading {model}", sys.stderr)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                nlls = _nlls(rows, numbers, model)
        except UserError as error:
            note(f"the rows have no nll: {error}")

    items = [
        {"row": number, "nll": nll, "text": row_text(rows.train[number], rows.tokenizer)}
        for number, nll in zip(numbers, nlls, strict=True)
    ]
    if as_json:
        print(json_text(items, indent=1))
        return
    if proof:
        print(proof)
    for item in items:
        nll = "" if item["nll"] is None else f", nll {item['nll']:.4f}"
        print(f"===== row {item['row']} of {len(rows.train):,}{nll}\n{item['text']}")


# --- the text of a row


def row_text(row: dict[str, list[int]], tokenizer: "PreTrainedTokenizerFast | None") -> str:
    """Return the text of a row, with a line between documents or answers.

    Args:
        row: the columns of the row.
        tokenizer: turns tokens into text. Without it, the text has their numbers.
    """
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    answers = row.get("answers")
    lines = []
    padding = 0  # tokens of the padding that ends here
    for start, end in pairwise([0, *_segment_starts(row), len(tokens)]):
        # Padding is at the end of a row, or between two answers.
        is_between_answers = answers is not None and answers[start] == PADDING_CODE
        is_padding = is_between_answers or all(label == IGNORED for label in labels[start:])
        if start > 0 and is_padding:
            padding += end - start
            continue

        lines += _padding_lines(padding)
        padding = 0
        if start > 0:
            is_second_answer = answers is not None and is_second(answers[start])
            lines.append(f"----- the {'other answer' if is_second_answer else 'next document'}")
        lines.append(_marked_text(tokens, labels, range(start, end), tokenizer))
    return "\n".join(lines + _padding_lines(padding))


def _padding_lines(tokens: int) -> list[str]:
    return [f"----- {pluralize(tokens, 'padding token')}"] if tokens else []


def _segment_starts(row: dict[str, list[int]]) -> list[int]:
    """Return where a document, an answer or padding begins, except the beginning of the row."""
    from llmtrain.data.packing import LENGTHS

    length = len(row["input_ids"])
    answers = row.get("answers")
    if answers is not None:
        return [i for i in range(1, length) if answers[i] != answers[i - 1]]
    if "position_ids" in row:
        return [i for i in range(1, length) if row["position_ids"][i] == 0]

    end = length
    if LENGTHS in row:
        end = row[LENGTHS][0]
    else:
        # The rows were made elsewhere. Their padding repeats one token and is not trained.
        tokens = row["input_ids"]
        labels = row.get("labels", tokens)
        while end > 0 and labels[end - 1] == IGNORED and tokens[end - 1] == tokens[-1]:
            end -= 1
    return [end] if 0 < end < length else []


def _marked_text(
    tokens: list[int],
    labels: list[int],
    positions: range,
    tokenizer: "PreTrainedTokenizerFast | None",
) -> str:
    """Return the text at some positions of a row, with marks around the target tokens."""
    from llmtrain.models.generation import continuation_text

    # The first token of a row is not predicted, and a negative one comes after the end of a text.
    marked = [(i > 0 and labels[i] != IGNORED, tokens[i]) for i in positions if tokens[i] >= 0]
    before: list[int] = []
    pieces = []
    for is_target, group in groupby(marked, key=lambda pair: pair[0]):
        numbers = [token for _, token in group]
        if tokenizer is None:
            piece = " ".join(map(str, numbers))
        else:
            piece = printable(
                continuation_text(tokenizer, before, numbers, skip_special_tokens=False)
            )
        before += numbers
        pieces.append(_TARGETS.format(piece) if is_target else piece)
    return (" " if tokenizer is None else "").join(pieces)
