"""A recipe's defaults < YAML files < the command line.

A key in a YAML file is the flag of the same name, and its value passes through the same parser. So
both have the same names, the same conversions and the same errors.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llmtrain.config import yaml_file
from llmtrain.config.flags import COMMAND_LINE, Config, configs_of, flags_of
from llmtrain.config.parser import Parser, did_you_mean, text_of
from llmtrain.console import in_notebook, rank
from llmtrain.errors import UserError

_OPTIONS = ("help", "help_all", "config", "print_config")  # flags that are no settings
# "output_dir" may have the name of the run.
_FLAGS_WITH_PLACEHOLDERS = ("run_name", "output_dir", "mirror")
S = TypeVar("S")


def parse(defaults: S, argv: list[str] | None = None, description: str | None = None) -> S:
    """Parse the command line into a copy of ``defaults``.

    ``--config A.yaml B.yaml`` reads flags from files; later files take precedence. LLMTRAIN_CONFIG
    names a file that is read before them. Flags on the command line take precedence over files.
    Each config of the result records in ``origins`` where its values come from.

    ``--print_config`` prints the result as such a file, and exits.

    Args:
        defaults: the defaults of a recipe, a dataclass whose fields are sections of flags.
        argv: the words of the command line; by default, those of this process, or none in a
            notebook.
        description: the text at the top of ``--help``.

    Raises:
        UserError: if a value is wrong, or if flags or keys are unknown or abbreviated. The message
            then names a replacement for each, or the nearest name.
    """
    if argv is None:
        # In a notebook, the words of this process are those of its kernel.
        argv = [] if in_notebook() else sys.argv[1:]
    configs = configs_of(defaults)
    parser = recipe_parser(configs, description)
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    options = {name: given.pop(name, None) for name in _OPTIONS}
    if options["help_all"]:
        parser = recipe_parser(configs, description, show_hidden=True)
    if options["help"] or options["help_all"]:
        _print_and_exit(parser.format_help())
    if unknown:
        parser.refuse_unknown(unknown)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [*_below_command_line(parser, options["config"]), (COMMAND_LINE, given)]
    for origin, values_of_source in sources:
        values |= values_of_source
        origins |= dict.fromkeys(values_of_source, origin)

    parsed = {part: config.with_given(values, origins) for part, config in configs.items()}
    owners = {name: config for config in parsed.values() for name in flags_of(config)}
    for name in _FLAGS_WITH_PLACEHOLDERS:
        if name in owners and owners[name].is_set(name):
            others = {flag: owners[flag] for flag in owners if flag not in ("output_dir", name)}
            setattr(owners[name], name, _filled(getattr(owners[name], name), others))
    if options["print_config"]:
        _print_and_exit(yaml_file.text_of_settings(parser.sections, owners))
    return dataclasses.replace(defaults, **parsed)  # type: ignore[type-var]


def recipe_parser(
    configs: Mapping[str, Config], description: str | None = None, *, show_hidden: bool = False
) -> Parser:
    """Return the parser of a recipe.

    Args:
        configs: the sections of its settings.
        description: the text at the top of ``--help``.
        show_hidden: whether ``--help`` shows all flags.
    """
    parser = Parser(
        program="recipes",
        usage=f"{Path(sys.argv[0]).name} [--config FILE ...] [flags]",
        description=description,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    parser.add_argument(
        "--help_all",
        action="store_true",
        help="show this help with further flags, which are rarely needed",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="YAML files with flags; later files take precedence, and flags on the command line "
        "over all of them; LLMTRAIN_CONFIG in the environment names a file to read first",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every setting as YAML, which --config can read, and stop",
    )
    parser.add_flags(configs.values(), show_hidden=show_hidden)
    return parser


def _below_command_line(
    parser: Parser, paths: list[str] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the values from elsewhere with their origin; later ones take precedence."""
    files = [(path, path) for path in paths or []]
    path_of_platform = os.environ.get("LLMTRAIN_CONFIG")
    if path_of_platform:
        files.insert(0, (f"LLMTRAIN_CONFIG={path_of_platform}", path_of_platform))
    for origin, path in files:
        try:
            values = parser.values_of(yaml_file.read(path, parser.flags))
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
        yield origin, values


def _filled(template: str, owners: Mapping[str, Config]) -> str:
    """Return the name of a run with the values of flags in place of ``{learning_rate}``.

    What is no part of a name, such as ``/``, becomes a dash.

    Args:
        template: the name with placeholders.
        owners: the section of each flag that it may name.

    Raises:
        UserError: if a placeholder is no flag, or a flag that nobody has set.
    """

    def value_of(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name not in owners:
            suggestion = did_you_mean(name, owners) or "; use another name."
            raise UserError(f"{template}: no flag for a name is called '{name}'{suggestion}")
        if not owners[name].is_set(name):
            # A recipe may still choose another default, for a pretrained model or short data.
            raise UserError(f"{template}: set --{name}, too; its default may change.")
        value = getattr(owners[name], name)
        text = "auto" if value is None else text_of(value)
        return re.sub(r"[^\w.,+=-]+", "-", text).lstrip(".")

    return re.sub(r"{([^{}]*)}", value_of, template)


def _print_and_exit(text: str) -> NoReturn:
    """Print a text, from rank 0 only, and exit."""
    if rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(text, flush=True)
    raise SystemExit(0)
