"""Run a few steps of a recipe, and show when each process does what.

It shows the phases of each step, when each bucket of gradients is full and sent, how much of that
time is hidden behind the backward pass, and which process keeps the others waiting.
"""

import argparse

from llmtrain.errors import UserError
from llmtrain.launching.children import (
    gpu_count,
    recipe_command,
    run_command,
    short_run_flags,
)
from llmtrain.launching.launcher import value_of_flag
from llmtrain.recipe_arguments import add_recipe_arguments, process_count, separate_recipe_flags
from llmtrain.types import JsonObject

GROUP = "Check and understand"
EXAMPLES = ("llmtrain xray recipes/gpt.py",)

_OUTPUT_DIR = "runs/xray"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes (default: from the config file, or one per GPU and at least 2)",
    )
    parser.add_argument(
        "--steps",
        default="6:8",
        metavar="A:B",
        help="record steps A to B; the first steps of a run are slow (default: %(default)s)",
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config to launch the recipe with"
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.record.resume import candidate_folders, is_free

    separate_recipe_flags(arguments)
    processes = process_count(arguments, default=max(2, gpu_count()))
    first_step, _, last_step = arguments.steps.partition(":")
    if not (first_step.isdecimal() and last_step.isdecimal()):
        raise UserError(
            f"--steps {arguments.steps}: write the first and the last step, such as 6:8."
        )

    output_dir = value_of_flag(arguments.flags, "output_dir")
    if not isinstance(output_dir, str):
        output_dir = _OUTPUT_DIR
    folder = next(folder for folder in candidate_folders(output_dir) if is_free(folder))
    forced: JsonObject = short_run_flags(int(last_step)) | {
        "xray_steps": arguments.steps,
        "resume_from_checkpoint": "never",
        "output_dir": str(folder),
    }
    recipe = [arguments.recipe, *arguments.flags]
    command = recipe_command(recipe, forced, processes, arguments.config_file)
    has_too_few_gpus = not arguments.config_file and processes > gpu_count()
    run_command(command, on_cpu=has_too_few_gpus)

    result = folder / "xray"
    if arguments.json:
        print((result / "summary.json").read_text())
        return
    print((result / "table.txt").read_text())
    print(
        f"Open {result}/timeline.html in a browser, "
        f"or {result}/trace.json in ui.perfetto.dev or chrome://tracing."
    )
