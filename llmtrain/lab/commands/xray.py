"""Run a few steps of a recipe, and show when each process does what.

It shows the phases of each step, when each bucket of gradients is full and sent, how much of that
time is hidden behind the backward pass, and which process keeps the others waiting. With a run
folder instead of a recipe, it shows the steps that the run has recorded with --xray_steps.
"""

import argparse
import sys
from pathlib import Path

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject, json_text
from llmtrain.launching.children import (
    gpu_count,
    has_too_few_gpus,
    process_count,
    recipe_command,
    run_command,
    short_run_flags,
)
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe
from llmtrain.record.history import candidate_folders, is_free

EXAMPLES = (
    "llmtrain xray recipes/gpt.py",
    "llmtrain xray runs/gpt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(
        parser, "path of the recipe, which gets all flags not listed here; or a run folder"
    )
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
    parser.add_argument(
        "--output_dir",
        default="runs/xray",
        metavar="DIR",
        help="the folder of the run that the recipe makes (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.xray.recording import Recording
    from llmtrain.lab.xray.timeline import as_html, as_lines, summary

    is_run_folder = Path(arguments.recipe).is_dir()
    if not is_run_folder:
        check_recipe(arguments.recipe)
    elif arguments.flags:
        raise UserError(
            f"{arguments.flags[0]} is for a recipe, and {arguments.recipe} is a folder."
        )

    folder = Path(arguments.recipe) if is_run_folder else _record(arguments)
    recording = Recording.read(folder)
    numbers = summary(recording)
    lines = as_lines(numbers)
    title = f"x-ray of {folder}: steps {recording.steps[0]} to {recording.steps[-1]}"
    page = folder / "xray" / "timeline.html"
    page.write_text(as_html(recording, lines, title))

    if arguments.json:
        print(json_text(numbers, indent=1))
    else:
        print("\n".join([*lines, "", f"Open {page} in a browser."]))


def _record(arguments: argparse.Namespace) -> Path:
    """Run the recipe until the last step to record, and return the run folder."""
    processes = process_count(
        arguments.processes, arguments.config_file, default=max(2, gpu_count())
    )
    first_step, _, last_step = arguments.steps.partition(":")
    if not (first_step.isdecimal() and last_step.isdecimal()):
        raise UserError(
            f"--steps {arguments.steps}: write the first and the last step, such as 6:8."
        )

    candidates = candidate_folders(arguments.output_dir)
    folder = next(folder for folder in candidates if is_free(folder))
    forced: JsonObject = short_run_flags(int(last_step), arguments.flags) | {
        "xray_steps": arguments.steps,
        "resume_from_checkpoint": "never",
        "output_dir": str(folder),
    }
    recipe = [arguments.recipe, *arguments.flags]
    command = recipe_command(recipe, forced, processes, arguments.config_file)
    say("run", f"{pluralize(processes, 'process')}: {last_step} steps, in {folder}", sys.stderr)
    run_command(command, on_cpu=has_too_few_gpus(processes, arguments.config_file))
    return folder
