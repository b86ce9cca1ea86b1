"""Run a recipe with several seeds, one after the other, to see how much its loss varies.

The runs get --seed S, S + 1, ... and folders such as runs/gpt-seed-0, where S is the recipe's own
seed and runs/gpt is its own --output_dir. The same command again skips the seeds that are finished
and resumes one that is not; a larger N adds seeds. Ctrl-C and SIGTERM reach the run, which saves.
The exit status is that of the run that did not finish, or 0.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain.console import labelled, say
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.lab.commands.compare import as_json, compare_groups, group_lines
from llmtrain.launching.children import (
    Ending,
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
_SAVE_SECONDS = 60.0  # for a run that still saves after its launcher has ended
_POLL_SECONDS = 0.1


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
    first_seed = settings["seed"]
    seeds = range(first_seed, first_seed + arguments.count)
    for seed in seeds:
        _check_folder(arguments, _seed_folder(output_dir, seed), seed)

    for i, seed in enumerate(seeds, start=1):
        folder = _seed_folder(output_dir, seed)
        history = History.read(folder)
        if history.state == "finished":
            _report(arguments, f"{seed}: {folder} is finished")
            continue

        _report(arguments, f"{seed}: {folder}, {i} of {len(seeds)}")
        ending = _run_seed(arguments, processes, output_dir, seed)
        if ending.status or History.read(folder).state != "finished":
            _stop(arguments, seed, folder, ending)

    _summarise(arguments, output_dir, seeds)


def _report(arguments: argparse.Namespace, text: str) -> None:
    """Print a line about a seed, unless stdout is for JSON."""
    if not arguments.json:
        say("seed", text)


def _seed_folder(output_dir: Path, seed: int) -> Path:
    """Return the folder of the run with a seed, such as ``runs/gpt-seed-1`` for ``runs/gpt``."""
    return output_dir.with_name(f"{output_dir.name}-seed-{seed}")


def _seed_flags(folder: Path, seed: int) -> list[str]:
    """Return the flags that make the run of a seed. They override those of the user."""
    return ["--seed", str(seed), "--output_dir", str(folder)]


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


def _check_folder(arguments: argparse.Namespace, folder: Path, seed: int) -> None:
    """Check that the folder of a seed is free, or holds a run of the same command.

    Raises:
        UserError: if it is neither.
    """
    if is_free(folder):
        return
    if not is_run(folder):
        raise UserError(f"{folder} is not a run folder; use another --output_dir.")

    starts = History.of_run(folder).starts
    recorded: list[str] = (starts or [{}])[-1].get("command") or []
    command = [arguments.recipe, *arguments.flags, *_seed_flags(folder, seed)]
    if recorded != redacted(command):
        raise UserError(
            f"{folder} holds a run of another command ({shlex.join(recorded)}); use another "
            "--output_dir."
        )


# --- the runs


def _run_seed(arguments: argparse.Namespace, processes: int, output_dir: Path, seed: int) -> Ending:
    """Run the recipe with a seed until it ends."""
    folder = _seed_folder(output_dir, seed)
    recipe = [arguments.recipe, *arguments.flags, *_seed_flags(folder, seed)]
    command = recipe_command(recipe, {}, processes, arguments.config_file)
    # One process chooses its device itself.
    on_cpu = processes > 1 and has_too_few_gpus(processes, arguments.config_file)
    # With --json, stdout is for the result.
    stdout = _STDERR if arguments.json else None
    ending = run_to_end(command, on_cpu=on_cpu, stdout=stdout)

    # A launcher may end at once when it is asked to stop, while the run still saves.
    deadline = time.monotonic() + _SAVE_SECONDS
    while History.read(folder).is_in_progress and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return ending


def _stop(arguments: argparse.Namespace, seed: int, folder: Path, ending: Ending) -> None:
    """Say how to go on after a seed that has not finished, and exit with its status."""
    state = History.read(folder).summary() if is_run(folder) else "it has not begun"
    text = (
        f"seed {seed} has not finished in {folder}: {state}; the same command again goes on with it"
    )
    print(labelled("stopped", text), file=sys.stderr)
    if ending.stop_signal is not None:
        sys.exit(128 + ending.stop_signal)  # a launcher has another status
    sys.exit(ending.status or 1)


def _summarise(arguments: argparse.Namespace, output_dir: Path, seeds: range) -> None:
    """Print how much the eval loss varies, and how to compare it with that of another setting."""
    histories = [History.of_run(_seed_folder(output_dir, seed)) for seed in seeds]
    comparison = compare_groups(histories)
    if arguments.json:
        print(json_text(as_json(comparison), indent=1))
        return

    lines = group_lines(comparison)
    if len(comparison.groups) > 1:
        text = "the runs are not alike: see the names of the groups above"
        lines.append(labelled("differ", text))

    other = output_dir.with_name("OTHER")
    compare = f"llmtrain compare {output_dir}-seed-* {other}-seed-*"
    lines.append(labelled("next", f"repeat another setting with these seeds, then {compare}"))
    print("\n".join(lines))
