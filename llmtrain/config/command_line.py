"""A recipe's defaults < the environment < a YAML file < the command line.

A key in a YAML file is the flag of the same name, and its value passes through the same parser. So
both have the same names, the same conversions and the same errors.
"""

import contextlib
import copy
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from llmtrain.config import yaml_file
from llmtrain.config.flag_parser import FlagParser, refuse
from llmtrain.config.flag_syntax import Flag
from llmtrain.config.flags import Config, configs_of, flags_of
from llmtrain.config.help import help_text
from llmtrain.config.section_checks import check_sections
from llmtrain.console import in_notebook, rank
from llmtrain.errors import UserError

COMMAND_LINE = "command line"  # the origin of a flag that is not from a file
_CONFIG_VARIABLE = "LLMTRAIN_CONFIG"  # names a YAML file of flags, in the environment
S = TypeVar("S")


def parse(defaults: S, argv: list[str] | None = None, description: str | None = None) -> S:
    """Parse the command line into a copy of ``defaults``.

    ``--config FILE.yaml`` reads flags from a file. Flags on the command line take precedence. Below
    both are the environment: the variables of single flags, and LLMTRAIN_CONFIG, which names
    another file. Each config of the result records in ``origins`` where its values come from.

    ``--print_config`` prints the result as such a file, and exits.

    Args:
        defaults: the defaults of a recipe, a dataclass whose fields are sections of flags.
        argv: the words of the command line; by default, those of this process, or none in a
            notebook.
        description: the text at the top of ``--help``.

    Raises:
        UserError: if a value is wrong, or if flags or keys are unknown or abbreviated. The message
            then names a replacement for each, or the nearest name. Mistakes in a section of the
            recipe are errors, too.
    """
    if argv is None:
        # In a notebook, the words of this process are those of its kernel.
        argv = [] if in_notebook() else sys.argv[1:]
    check_sections(defaults)
    configs = configs_of(defaults)
    parser = FlagParser(configs)

    values, problems = parser.parse(argv)
    show_all = values.pop("help_all", False)
    if values.pop("help", False) or show_all:
        _print_and_exit(help_text(parser, description, show_hidden=show_all))
    path = values.pop("config", None)
    should_print = values.pop("print_config", False)

    # From the highest precedence to the lowest: a source adds only flags that are not set yet.
    given = {name: _Given(value, COMMAND_LINE) for name, value in values.items()}
    sources = _read_environment(parser)
    if path is not None:
        sources.insert(0, _read_file(parser, path, f"--config {path}", origin=path))
    for set_by_source, source_problems in sources:
        given = set_by_source | given
        problems += source_problems
    if problems:
        refuse(problems)

    parsed = {part: _with_flags(config, given) for part, config in configs.items()}
    settings = dataclasses.replace(defaults, **parsed)  # type: ignore[type-var]
    if should_print:
        _print_and_exit(_config_text(parser, parsed))
    return settings


class _Given(NamedTuple):
    """A value that the user has set, and where it is from, as in :class:`Config`."""

    value: Any
    origin: str


def _read_file(
    parser: FlagParser, path: str, named_by: str, origin: str
) -> tuple[dict[str, _Given], list[str]]:
    """Return the settings of a YAML file, and its mistakes.

    Args:
        parser: the parser of the flags.
        path: the path of the file.
        named_by: what names the file, such as ``--config my.yaml``, for errors.
        origin: the origin of its settings.
    """
    content = yaml_file.read(path, parser.keys, named_by)
    values, value_problems = parser.parse_flags(content.flags)
    problems = content.problems + value_problems
    if content.unknown:
        problems.append(parser.describe_unknown("key", content.unknown))
    if problems:
        problems[0] = f"{path}: {problems[0]}"
    return {name: _Given(value, origin) for name, value in values.items()}, problems


def _read_environment(parser: FlagParser) -> list[tuple[dict[str, _Given], list[str]]]:
    """Return the settings of the environment, and their mistakes. The first takes precedence."""
    sources = []
    for flag in parser.flags:
        words = os.environ.get(flag.variable or "", "").replace(",", " ").split()
        if flag.variable and words:
            values, problems = parser.parse_flags([(f"--{flag.name}", words)])
            given = {name: _Given(value, flag.variable) for name, value in values.items()}
            sources.append((given, problems))

    path = os.environ.get(_CONFIG_VARIABLE)
    if path:
        named_by = f"{_CONFIG_VARIABLE}={path}"
        sources.append(_read_file(parser, path, named_by, origin=named_by))
    return sources


def _with_flags(default: Config, given: Mapping[str, _Given]) -> Config:
    """Return a copy of a config with its share of the user's settings.

    Args:
        default: the config of the recipe.
        given: the user's settings, also for other configs. If not all of it is from the command
            line, an error says where a value is from.

    Raises:
        UserError: if a value is out of range.
    """
    own = {name: given[name] for name in flags_of(default) if name in given}
    origins = {name: entry.origin for name, entry in own.items()}
    values = {name: entry.value for name, entry in own.items()}
    try:
        copied = copy.deepcopy(default)
        config = dataclasses.replace(copied, **values)  # type: ignore[type-var]
        config.origins = {**default.origins, **origins}
        config.check_given()
    except UserError as error:
        has_sources = any(entry.origin != COMMAND_LINE for entry in given.values())
        source = _source_of_error(str(error), origins) if has_sources else ""
        raise UserError(f"{error}{source}") from None
    return config


def _source_of_error(message: str, origins: Mapping[str, str]) -> str:
    """Return where the flag that a message names was set, such as `` (my.yaml)``."""
    for name, origin in origins.items():
        if f"--{name} " in message:
            return f" ({origin})"
    return ""


def _config_text(parser: FlagParser, configs: Mapping[str, Config]) -> str:
    """Return settings as a file for ``--config``."""
    owners: dict[str, Config] = {}
    for config in configs.values():
        owners.update(dict.fromkeys(flags_of(config), config))

    groups = {}
    for title, flags in parser.settings.items():
        groups[title] = [
            yaml_file.Entry(
                name=flag.name,
                value=_value_in_file(flag, getattr(owners[flag.name], flag.name)),
                help=_help_with_choices(flag),
                is_set=owners[flag.name].is_set(flag.name),
            )
            for flag in flags
        ]
    return yaml_file.text_of(groups)


def _value_in_file(flag: Flag, value: Any) -> Any:
    """Return the value of a setting as a YAML file has it."""
    return "auto" if value is None and flag.takes_auto else value


def _help_with_choices(flag: Flag) -> str:
    """Return the help of a flag, with the words that it takes if they are few."""
    return f"{flag.help} (one of {', '.join(flag.choices)})" if flag.choices else flag.help


def _print_and_exit(text: str) -> NoReturn:
    """Print a text, from rank 0 only, and exit."""
    if rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(text, flush=True)
    raise SystemExit(0)
