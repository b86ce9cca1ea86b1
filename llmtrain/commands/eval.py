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
    from llmtrain.errors import UserError, require
    from llmtrain.files import append_json_line, json_text
    from llmtrain.launching.accelerator import start_accelerator
    from llmtrain.models.generation import model_folder
    from llmtrain.record.history import History, is_run

    for name, least in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(arguments, name)
        require(value is None or value >= least, f"--{name} {value} must be at least {least}.")
    include, run_folder = arguments.include_path, Path(arguments.model)
    require(include is None or Path(include).is_dir(), f"--include_path {include} is no folder.")
    try:
        from llmtrain.models.harness import forget, scores
    except ImportError:
        raise UserError(
            "llmtrain eval needs lm-evaluation-harness: pip install 'llmtrain[eval]'."
        ) from None
    with contextlib.redirect_stdout(sys.stderr):  # the banner and bars
        accelerator = start_accelerator()
        [source] = broadcast_object_list(
            [model_folder(arguments.model)]
        )  # a run may save another one meanwhile
        files = sorted(path for path in Path(source).glob("*") if path.is_file())
        options = {
            name: getattr(arguments, name)
            for name in ("num_fewshot", "limit", "apply_chat_template")
        }
        asked = [
            source,
            arguments.tasks,
            include,
            options,
            accelerator.num_processes,
            accelerator.mixed_precision,
        ]
        key = json_text([*asked, *(file_digest(path).hex() for path in files)])
        answers = cache_folder() / "answers" / hashlib.sha256(key.encode()).hexdigest()[:32]
        found = scores(
            accelerator, source, arguments.tasks, include, arguments.batch_size, answers, **options
        )
    saved = Path(source).parent.name.partition("step-")[2]
    step = int(saved) if saved.isdecimal() else History.found(run_folder).step
    lines = [
        {"step": step, "time": time.time(), "model": source, **options, **line} for line in found
    ]
    for line in lines if is_run(run_folder) else []:
        append_json_line(run_folder / "scores.jsonl", line)
    forget(accelerator, answers)
    if arguments.json and lines:
        print(json_text(lines))
    for line in [] if arguments.json else lines:
        error = "" if line["stderr"] is None else f" ± {line['stderr']:.4f}"
        print(
            f"{line['task']:24} {line['metric']:12} {line['value']:.4f}{error}  of {line['questions']:,} questions"
        )
