"""Run a recipe with several seeds, one after the other, to see how much its loss varies.

The runs get --seed S, S + 1, ... and folders such as runs/gpt-seed-0, where S is the recipe's own
seed and runs/gpt is its own --output_dir. The same command again skips the seeds that are finished
and resumes one that is not; a larger N adds seeds. Ctrl-C and SIGTERM reach the run, which saves.
The exit status is that of the run that did not finish, or 0.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from llmtrain.console import labelled, say
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.lab.commands.compare import as_json, compare_groups, group_lines
from llmtrain.launching.children import (
    has_too_few_gpus,
    process_count,
    recipe_command,
    run_command,
    run_to_end,
)
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe
from llmtrain.record.history import History, candidate_folders, is_free, is_run
from llmtrain.redaction import redacted

EXAMPLES = (
    "llmtrain repeat 5 recipes/gpt.py",
    "llmtrain repeat 5 recipes/gpt.py --learning_rate 0.01 --output_dir runs/slow",
)

_STDERR = 2  # the file descriptor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("count", type=int, metavar="N", help="number of seeds")
    add_recipe_arguments(parser)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="number of processes of each run (default: from the config file, or 1)",
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config to launch the recipe with"
    )


def run(arguments: argparse.Namespace) -> None:
    check_recipe(arguments.recipe)
    if arguments.count < 1:
        raise UserError(f"{arguments.count} seeds: run at least one.")
    processes = process_count(arguments.processes, arguments.config_file, default=1)
    settings = _recipe_settings(arguments)
    output_dir = next(candidate_folders(settings["output_dir"]))
    folders = {}
    recipes = {}
    for seed in range(settings["seed"], settings["seed"] + arguments.count):
        folders[seed] = output_dir.with_name(f"{output_dir.name}-seed-{seed}")
        # These flags override those of the user.
        flags = ["--seed", str(seed), "--output_dir", str(folders[seed])]
        recipes[seed] = [arguments.recipe, *arguments.flags, *flags]
        _check_folder(folders[seed], recipes[seed])

    for i, (seed, folder) in enumerate(folders.items(), start=1):
        is_finished = History.read(folder).state == "finished"
        progress = " is finished" if is_finished else f", {i} of {len(folders)}"
        if not arguments.json:
            say("seed", f"{seed}: {folder}{progress}")
        if not is_finished:
            _run_seed(arguments, processes, recipes[seed], folder)

    comparison = compare_groups([History.of_run(folder) for folder in folders.values()])
    if arguments.json:
        print(json_text(as_json(comparison), indent=1))
        return
    other = output_dir.with_name("OTHER")
    compare = f"llmtrain compare {output_dir}-seed-* {other}-seed-*"
    following = labelled("next", f"repeat another setting with these seeds, then {compare}")
    print("\n".join([*group_lines(comparison), following]))


# --- the recipe, and runs that exist


def _recipe_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the recipe with the user's flags, as the recipe itself prints them.

    Raises:
        UserError: if the recipe refuses the flags, or has no settings.
    """
    from llmtrain.config.yaml_file import settings_in

    command = recipe_command([arguments.recipe, *arguments.flags], {}, processes=1)
    text = run_command([*command, "--print_config"], on_cpu=True)
    settings = settings_in(text)
    if "seed" not in settings or "output_dir" not in settings:
        raise UserError(
            f"{arguments.recipe} --print_config shows no seed and no output_dir; name a recipe "
            "with these flags, and leave --help out."
        )
    return settings


def _check_folder(folder: Path, recipe: list[str]) -> None:
    """Check that the folder of a seed is free, or holds a run of the same command.

    Args:
        folder: the folder.
        recipe: the recipe and its flags.

    Raises:
        UserError: if it is neither.
    """
    if is_free(folder):
        return
    if not is_run(folder):
        raise UserError(f"{folder} is not a run folder; use another --output_dir.")

    starts = History.of_run(folder).starts
    recorded: list[str] = (starts or [{}])[-1].get("command") or []
    if recorded != redacted(recipe):
        raise UserError(
            f"{folder} holds a run of another command ({shlex.join(recorded)}); use another "
            "--output_dir."
        )


# --- the runs


def _run_seed(
    arguments: argparse.Namespace, processes: int, recipe: list[str], folder: Path
) -> None:
    """Run the recipe until it ends; if the run is not finished then, exit with its status."""
    command = recipe_command(recipe, {}, processes, arguments.config_file)
    # One process chooses its device itself.
    on_cpu = processes > 1 and has_too_few_gpus(processes, arguments.config_file)
    # With --json, stdout is for the result.
    stdout = _STDERR if arguments.json else None
    status, stop_signal = run_to_end(command, on_cpu=on_cpu, stdout=stdout)

    history = History.read(folder)
    if history.state == "finished" and not status:
        return
    state = history.summary() if is_run(folder) else "it has not begun"
    text = f"{folder} has not finished: {state}; the same command again goes on with it"
    print(labelled("stopped", text), file=sys.stderr)
    if stop_signal is not None:
        sys.exit(128 + stop_signal)  # a launcher has another status
    sys.exit(status or 1)
