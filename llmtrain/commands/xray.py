"""Run some updates of a recipe, and show what each process does when.

It shows what is computed, when each bucket of gradients is full and travels, how much of that is hidden behind the
backward pass, and who keeps the others waiting.
"""

import argparse
import itertools

from llmtrain.commands._recipe import own_and_recipes, take_recipe
from llmtrain.errors import UserError
from llmtrain.launching.children import command_of, gpus, read_config, run_to_end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    take_recipe(parser)
    default = "(default: as the accelerate config says, or one a GPU, at least 2)"
    parser.add_argument("--processes", type=int, metavar="N", help=default)
    which = "those to show; the first are not like others (%(default)s)"
    parser.add_argument("--updates", default="6:8", metavar="A:B", help=which)
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config that the recipe is launched with"
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.record.resume import is_free, names

    own_and_recipes(arguments)
    config = read_config(arguments.config_file) if arguments.config_file else {}
    processes = arguments.processes or config.get("num_processes", max(2, gpus()))
    words = [word for flag in arguments.flags for word in flag.split("=", 1)]
    asked = next(
        (value for flag, value in itertools.pairwise(words) if flag == "--output_dir"), "runs/xray"
    )
    folder = next(folder for folder in names(asked) if is_free(folder))
    first, _, last = arguments.updates.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError(f"--updates {arguments.updates}: write two updates, such as 6:8.")
    forced = {"xray_steps": arguments.updates, "max_steps": last, "report_to": "none"}
    forced |= {"resume_from_checkpoint": "never", "output_dir": str(folder)}
    command = command_of(
        [arguments.recipe, *arguments.flags], forced, processes, arguments.config_file
    )
    run_to_end(command, on_cpu=not arguments.config_file and processes > gpus())
    found = folder / "xray"
    if arguments.json:
        print((found / "summary.json").read_text())
        return
    print((found / "table.txt").read_text())
    print(
        f"{found}/timeline.html shows it; {found}/trace.json is for ui.perfetto.dev or chrome://tracing"
    )
