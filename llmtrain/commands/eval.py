"""Score a model on tasks of lm-evaluation-harness, on one process or on several.

For several processes: accelerate launch -m llmtrain eval RUN_OR_MODEL --tasks TASK.
"""

import argparse
import contextlib
import functools
import hashlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.json_types import JsonObject
    from llmtrain.parallel.ranks import Ranks

EXAMPLES = (
    "llmtrain eval runs/finetune --tasks hellaswag arc_easy",
    "accelerate launch -m llmtrain eval runs/finetune --tasks hellaswag",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="folder of a run (which keeps the scores), a checkpoint or a model, or a hub name",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="names of tasks or groups, such as hellaswag",
    )
    parser.add_argument(
        "--include_path",
        metavar="FOLDER",
        help="folder with further tasks, in the harness's YAML format",
    )
    parser.add_argument(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="number of solved examples in each prompt (default: the task's own)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="only the first N questions of each task, for a quick test",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=8,
        metavar="N",
        help="questions per batch on each process (default: %(default)s)",
    )
    parser.add_argument(
        "--apply_chat_template",
        action="store_true",
        help="format each question with the model's chat template",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.errors import EVAL_MEMORY_REMEDY
    from llmtrain.launching.process import launch

    launch(functools.partial(_evaluate, arguments), EVAL_MEMORY_REMEDY)


def _evaluate(arguments: argparse.Namespace) -> None:
    """Score the model; rank 0 stores and prints the scores."""
    from llmtrain.errors import UserError
    from llmtrain.files import append_json_line
    from llmtrain.launching.accelerator import start_accelerator
    from llmtrain.model_folders import model_folder
    from llmtrain.parallel.ranks import Ranks
    from llmtrain.parallel.team import Team
    from llmtrain.record.history import is_run

    _check(arguments)
    try:
        from llmtrain.models.lm_eval import evaluate_tasks, remove_answers
    except ImportError:
        raise UserError(
            "llmtrain eval needs lm-evaluation-harness: pip install 'llmtrain[eval]'."
        ) from None

    options = {
        "num_fewshot": arguments.num_fewshot,
        "limit": arguments.limit,
        "apply_chat_template": arguments.apply_chat_template,
    }
    # The start-up log and progress bars go to stderr, so that stdout has only the scores.
    with contextlib.redirect_stdout(sys.stderr):
        ranks = Ranks(start_accelerator())
        # If the run is still training, it may save a newer model now. So all ranks take the model
        # that rank 0 has found.
        source = Team.everyone().on_main(lambda: model_folder(arguments.model))
        step = _step_of(source, arguments.model)
        answers = _answers_path(source, arguments, options, ranks)
        results = evaluate_tasks(
            ranks,
            source,
            arguments.tasks,
            arguments.include_path,
            arguments.batch_size,
            answers,
            **options,
        )

    common = {"step": step, "time": time.time(), "model": source, **options}
    entries = [{**common, **result} for result in results]
    run_folder = Path(arguments.model)
    if is_run(run_folder):
        for entry in entries:
            append_json_line(run_folder / "scores.jsonl", entry)
    remove_answers(ranks, answers)
    if entries:  # only rank 0 has any
        _print(entries, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> None:
    """Raise :class:`UserError` if an argument is out of range."""
    from llmtrain.errors import UserError

    for name, minimum in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name} {value} must be at least {minimum}.")
    include_path = arguments.include_path
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path} is not a folder.")


def _step_of(source: str, model: str) -> int:
    """Return the step that a model was saved at.

    Args:
        source: the folder of the model, which may be in a checkpoint ``step-N``.
        model: the argument of the command, which may be the folder of a run.
    """
    from llmtrain.record.history import History

    checkpoint_step = Path(source).parent.name.partition("step-")[2]
    if checkpoint_step.isdecimal():
        return int(checkpoint_step)
    return History.read(Path(model)).step


def _answers_path(
    source: str, arguments: argparse.Namespace, options: "JsonObject", ranks: "Ranks"
) -> Path:
    """Return where ranks keep their answers, so that an interrupted evaluation can continue.

    Its name depends on everything that the answers depend on, including the content of the model,
    or its commit on the hub.
    """
    from llmtrain.errors import as_user_error
    from llmtrain.file_digests import file_digest
    from llmtrain.files import cache_folder, json_text
    from llmtrain.models.hub_models import commit_of

    commit = None
    if not Path(source).is_dir():
        with as_user_error(f"{source} is no folder, and the hub did not provide it"):
            commit = commit_of(source)
    files = sorted(path for path in Path(source).glob("*") if path.is_file())
    key = [
        source,
        commit,
        arguments.tasks,
        arguments.include_path,
        options,
        ranks.world_size,
        ranks.accelerator.mixed_precision,
        *(file_digest(path).hex() for path in files),
    ]
    digest = hashlib.sha256(json_text(key).encode()).hexdigest()[:32]
    return cache_folder() / "answers" / digest


def _print(entries: "list[JsonObject]", as_json: bool) -> None:
    from llmtrain.files import json_text

    if as_json:
        print(json_text(entries))
        return
    for entry in entries:
        error = "" if entry["stderr"] is None else f" ± {entry['stderr']:.4f}"
        score = f"{entry['task']:24} {entry['metric']:12} {entry['value']:.4f}{error}"
        print(f"{score}  of {entry['questions']:,} questions")
