"""Score a model on tasks of lm-evaluation-harness; under `accelerate launch -m llmtrain eval ...` on all ranks."""

import argparse
import contextlib
import functools
import hashlib
import sys
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="RUN_OR_MODEL",
        help="a run's folder, which keeps the scores, a model's folder or a hub name",
    )
    add(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="names of tasks or groups, such as hellaswag",
    )
    add("--include_path", metavar="FOLDER", help="tasks of your own, in the harness's YAML")
    add(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="solved examples in each prompt (default: the task's)",
    )
    add("--limit", type=int, metavar="N", help="only the first N questions of a task, for a try")
    add(
        "--batch_size",
        type=int,
        default=8,
        metavar="N",
        help="questions at a time on each rank (%(default)s)",
    )
    add("--apply_chat_template", action="store_true", help="ask each question as a chat does")


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.launching.process import launch

    launch(functools.partial(_score, arguments))


def _score(arguments: argparse.Namespace) -> None:
    from accelerate.utils import broadcast_object_list

    from llmtrain.data.cache import cache_folder, file_digest
    from llmtrain.errors import UserError
    from llmtrain.files import append_json_line, json_text
    from llmtrain.launching.accelerator import start_accelerator
    from llmtrain.models.generation import model_folder
    from llmtrain.record.history import History, is_run

    for name, least in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value} must be at least {least}.")
    include_path = arguments.include_path
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path} is no folder.")
    try:
        from llmtrain.models.harness import forget, scores
    except ImportError:
        raise UserError(
            "llmtrain eval needs lm-evaluation-harness: pip install 'llmtrain[eval]'."
        ) from None

    options = {
        "num_fewshot": arguments.num_fewshot,
        "limit": arguments.limit,
        "apply_chat_template": arguments.apply_chat_template,
    }
    with contextlib.redirect_stdout(sys.stderr):  # the banner and progress bars
        accelerator = start_accelerator()
        # The run may save another model meanwhile, so all ranks take the one that the first has found.
        [source] = broadcast_object_list([model_folder(arguments.model)])
        run_folder = Path(arguments.model)
        saved = Path(source).parent.name.partition("step-")[2]
        step = int(saved) if saved.isdecimal() else History.found(run_folder).step

        files = sorted(path for path in Path(source).glob("*") if path.is_file())
        key = [
            source,
            arguments.tasks,
            include_path,
            options,
            accelerator.num_processes,
            accelerator.mixed_precision,
            *(file_digest(path).hex() for path in files),
        ]
        digest = hashlib.sha256(json_text(key).encode()).hexdigest()[:32]
        answers = cache_folder() / "answers" / digest
        results = scores(
            accelerator,
            source,
            arguments.tasks,
            include_path,
            arguments.batch_size,
            answers,
            **options,
        )

    common = {"step": step, "time": time.time(), "model": source, **options}
    lines = [{**common, **result} for result in results]
    if is_run(run_folder):
        for line in lines:
            append_json_line(run_folder / "scores.jsonl", line)
    forget(accelerator, answers)
    if not lines:  # only the main process has any
        return

    if arguments.json:
        print(json_text(lines))
        return
    for line in lines:
        error = "" if line["stderr"] is None else f" ± {line['stderr']:.4f}"
        print(
            f"{line['task']:24} {line['metric']:12} {line['value']:.4f}{error}  of {line['questions']:,} questions"
        )
