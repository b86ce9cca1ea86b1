"""Settings as dataclasses: a recipe's defaults, overridden by a YAML file and the command line.

A key in a YAML file becomes the flag of the same name, and passes through the same parser. So both
have the same names, the same conversions and the same errors. This module knows no particular flag.
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar, get_type_hints

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from llmtrain import config_file
from llmtrain.console import in_notebook, rank, say
from llmtrain.errors import UserError
from llmtrain.flag_hints import hint_for

_UNSET = object()
COMMAND_LINE = "command line"  # the origin of a flag that is not from a file
_CONFIG_VARIABLE = "LLMTRAIN_CONFIG"  # names a YAML file of flags, in the environment
_FLAG = re.compile(r"-+[^\W\d]")  # the beginning of a flag, unlike that of a number below 0
S = TypeVar("S")


class Config:
    """The base class of every dataclass of settings. Each of its fields is a flag.

    Attributes:
        affects: the parts of a run that its flags change, unless a flag names others. They are the
            words that :func:`flag` lists, separated by spaces.
        origins: where each flag that the user set comes from: ``command line``, the path of a YAML
            file, or an environment variable.
    """

    _argument_group_name: ClassVar[str] = ""  # the title in --help, under the name that HF expects
    affects: ClassVar[str] = "nowhere"
    origins: Mapping[str, str] = {}

    def check_given(self) -> None:
        """Raise :class:`UserError` if settings of the user contradict each other.

        :func:`parse` calls it. Unlike ``__post_init__``, it knows which settings the user set.
        """

    def is_set(self, name: str) -> bool:
        """Return whether the user set this flag, on the command line or in a file."""
        return name in self.origins

    def set_default(self, name: str, value: Any, why: str) -> None:
        """Set a flag to ``value`` and log it, unless the user set the flag.

        Args:
            name: the name of the flag.
            value: the value.
            why: the remark after the value in the log.
        """
        if not self.is_set(name):
            setattr(self, name, value)
            shown = f"{value:g}" if isinstance(value, float) else value
            say("default", f"--{name} {shown} ({why})")


def flag(
    default: Any,
    help: str,
    *,
    affects: str | None = None,
    hidden: bool = False,
    group: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    alias: str | None = None,
    variable: str | None = None,
) -> Any:
    """Return a dataclass field that is a command-line flag.

    Args:
        default: the default value.
        help: the text in ``--help``.
        affects: the parts of a run that the flag changes, separated by spaces. By default, those of
            the dataclass. If two runs diverge, ``llmtrain diff`` reports as causes only settings
            that affect the first quantity that differs:

            - ``seed``: what is drawn at random: initial weights, order of the rows, and dropout.
            - ``data``: the rows, their tokens and their labels.
            - ``model``: the weights and the function that they compute.
            - ``pass``: how a forward pass computes the loss, with the same weights: dropout, the
              implementation of attention, and the loss itself.
            - ``gradient``: how gradients are added over micro-batches and processes.
            - ``update``: what the optimizer does with the gradient, and when training ends.
            - ``layout``: only where and in which order things are computed. That changes no more
              than rounding errors, so it is reported as a cause only if these have grown. It makes
              no other run.
            - ``nowhere``: no numbers of the run, as with logging. ``llmtrain diff`` leaves these
              settings out.
        hidden: show the flag only in ``--help_all``.
        group: the title in ``--help`` under which the flag is shown. By default, that of the
            dataclass.
        metavar: the name of the value in ``--help``. By default, the last word of the flag.
        parse: turns the word on the command line into the value, or raises
            ``argparse.ArgumentTypeError``. By default, the type of the field does.
        alias: another name of the flag, which ``--help`` does not show.
        variable: an environment variable that sets the flag if neither ``--config`` nor the command
            line does. It has the words that would follow the flag, separated by spaces or commas.
    """
    metadata = {
        "help": help.replace("%", "%%"),
        "affects": affects,
        "hidden": hidden,
        "group": group,
        "metavar": metavar,
        "parse": parse,
        "alias": alias,
        "variable": variable,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_at_least(config: Config, minimum: float, *names: str) -> None:
    """Raise :class:`UserError` unless every named flag is finite and at least ``minimum``."""
    for name in names:
        value = getattr(config, name)
        is_valid = minimum <= value < math.inf  # False for NaN
        if is_valid:
            continue
        if math.isnan(value) or value == math.inf:
            raise UserError(f"--{name} {value} is out of range: it must be a finite number.")
        raise UserError(f"--{name} {value} is out of range: it must be at least {minimum}.")


def configs_of(settings: Any) -> dict[str, Config]:
    """Return the configs in a dataclass of settings, by the names of its fields."""
    return {name: value for name, value in vars(settings).items() if isinstance(value, Config)}


def flags_of(config: Config | type[Config]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a config by the names of their flags."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]  # all configs are dataclasses
    return {field.name: field for field in fields}


def parse(defaults: S, argv: list[str] | None = None, description: str | None = None) -> S:
    """Parse the command line into a copy of ``defaults``.

    ``--config FILE.yaml`` reads flags from a file. Flags on the command line take precedence. Below
    both are the environment: the variables of single flags, and LLMTRAIN_CONFIG, which names
    another file. Each config of the result records in ``origins`` where its values come from.

    ``--print_config`` prints the result as such a file, and exits.

    Args:
        defaults: a dataclass of configs, the defaults of a recipe.
        argv: the words of the command line; by default, those of this process, or none in a
            notebook.
        description: the text at the top of ``--help``.

    Raises:
        UserError: if a value is wrong, or if flags or keys are unknown or abbreviated. The message
            then says for each what to write instead, or the nearest name.
    """
    if argv is None:
        # In a notebook, the words of this process are those of its kernel.
        argv = [] if in_notebook() else sys.argv[1:]
    configs = configs_of(defaults)
    parser = _Parser(
        configs.values(),
        description,
        show_hidden=any(_with_underscores(word) == "--help_all" for word in argv),
    )

    given, problems = _read_words(parser, argv, COMMAND_LINE)
    path = given.values.pop("config", None)
    should_print = given.values.pop("print_config", False)
    sources = [] if path is None else [_read_file(parser, path, f"--config {path}", origin=path)]
    sources += _read_environment(parser, configs.values())
    for source, source_problems in sources:
        given = given.over(source)
        problems += source_problems
    if problems:
        parser.refuse(problems)

    parsed = {part: _with_flags(config, given) for part, config in configs.items()}
    settings = dataclasses.replace(defaults, **parsed)  # type: ignore[type-var]
    if should_print:
        _print_config(parser, parsed.values())
    return settings


class FlagDescription(NamedTuple):
    """A flag of a recipe, for a reference page.

    Attributes:
        name: the flag, such as ``--max_steps``; ``--no_NAME`` if the flag only turns something off.
        value: the name of its value, such as ``N``, or the words that it takes; empty for a switch.
        help: what it does.
        default: its default in this recipe; empty if it has none.
        alias: another name of the flag; empty if it has none.
        is_hidden: whether only ``--help_all`` shows it.
    """

    name: str
    value: str
    help: str
    default: str
    alias: str
    is_hidden: bool


def describe_flags(defaults: Any) -> dict[str, list[FlagDescription]]:
    """Return all flags of a recipe, by the title of their group in ``--help``.

    Args:
        defaults: the dataclass of configs with the recipe's defaults, as for :func:`parse`.
    """
    configs = configs_of(defaults)
    parser = _Parser(configs.values(), description=None, show_hidden=True)
    fields = {}
    for config in configs.values():
        fields.update(flags_of(config))

    groups: dict[str, list[FlagDescription]] = {}
    for title, actions in parser.settings_by_group().items():
        groups[title] = []
        for action in actions:
            metadata = fields[action.dest].metadata
            name = f"--{action.dest}"
            if action.default is True:
                name = f"--no_{action.dest}"
            description = FlagDescription(
                name=name,
                value=_value_name(action),
                help=parser.help_of(action),
                default="" if _is_switch(action) else _default_text(action),
                alias=f"--{metadata['alias']}" if metadata["alias"] else "",
                is_hidden=metadata["hidden"],
            )
            groups[title].append(description)
    return groups


class _Given(NamedTuple):
    """What the user has set. The keys are the names of the flags.

    Attributes:
        values: the values.
        origins: where each is from, as in :class:`Config`.
    """

    values: dict[str, Any]
    origins: dict[str, str]

    def over(self, other: "_Given") -> "_Given":
        """Return both together. These values take precedence over the others."""
        return _Given(
            values=other.values | self.values,
            origins=other.origins | self.origins,
        )

    def only(self, names: Collection[str]) -> "_Given":
        """Return what is given for some flags."""
        return _Given(
            values={name: value for name, value in self.values.items() if name in names},
            origins={name: origin for name, origin in self.origins.items() if name in names},
        )


def _read_file(
    parser: "_Parser", path: str, named_by: str, origin: str
) -> tuple[_Given, list[str]]:
    """Return what a YAML file sets, and what is wrong with it.

    Args:
        parser: the parser of the flags.
        path: the path of the file.
        named_by: what names the file, such as ``--config my.yaml``, for errors.
        origin: the origin of its settings.
    """
    content = config_file.read(path, parser.keys, parser.list_keys, named_by)
    given, problems = _read_words(parser, content.words, origin)
    problems = content.problems + problems
    if content.unknown:
        unknown = [_Unknown(key, value) for key, value in content.unknown.items()]
        problems.append(parser.describe_unknown("key", unknown))
    if problems:
        problems[0] = f"{path}: {problems[0]}"
    return given, problems


def _read_environment(
    parser: "_Parser", configs: Iterable[Config]
) -> list[tuple[_Given, list[str]]]:
    """Return what the environment sets, and what is wrong with it. The first takes precedence."""
    sources = []
    for config in configs:
        for name, field in flags_of(config).items():
            variable = field.metadata["variable"]
            words = os.environ.get(variable or "", "").replace(",", " ").split()
            if words:
                sources.append(_read_words(parser, [f"--{name}", *words], origin=variable))

    path = os.environ.get(_CONFIG_VARIABLE)
    if path:
        named_by = f"{_CONFIG_VARIABLE}={path}"
        sources.append(_read_file(parser, path, named_by, origin=named_by))
    return sources


def _read_words(parser: "_Parser", words: list[str], origin: str) -> tuple[_Given, list[str]]:
    """Return what the words of a command line set, and what is wrong with them."""
    values, problems = parser.explicit_values(words)
    given = _Given(
        values=values,
        origins=dict.fromkeys(values, origin),
    )
    return given, problems


def _with_flags(default: Config, given: _Given) -> Config:
    """Return a copy of a config with its share of what the user has set.

    Args:
        default: the config of the recipe.
        given: what the user has set, also for other configs. If not all of it is from the command
            line, an error says where a value is from.

    Raises:
        UserError: if a value is out of range.
    """
    own = given.only(flags_of(default).keys())
    try:
        copied = copy.deepcopy(default)
        config = dataclasses.replace(copied, **own.values)  # type: ignore[type-var]
        config.origins = own.origins
        config.check_given()
    except UserError as error:
        has_sources = {*given.origins.values()} - {COMMAND_LINE}
        source = _source_of_error(str(error), own.origins) if has_sources else ""
        raise UserError(f"{error}{source}") from None
    return config


def _print_config(parser: "_Parser", configs: Iterable[Config]) -> NoReturn:
    """Print settings as a file for ``--config``, from rank 0 only, and exit."""
    owners = {name: config for config in configs for name in flags_of(config)}
    groups = {}
    for title, actions in parser.settings_by_group().items():
        groups[title] = [
            config_file.Entry(
                name=action.dest,
                value=_value_in_file(action, getattr(owners[action.dest], action.dest)),
                help=parser.help_with_choices(action),
                is_set=owners[action.dest].is_set(action.dest),
            )
            for action in actions
        ]
    if rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(config_file.text_of(groups), flush=True)
    raise SystemExit(0)


def _value_in_file(action: argparse.Action, value: Any) -> Any:
    """Return the value of a setting as a YAML file has it."""
    is_auto = value is None and action.type is _bool_or_auto
    return "auto" if is_auto else value


def _source_of_error(message: str, origins: Mapping[str, str]) -> str:
    """Return where the flag that a message names was set, such as `` (my.yaml)``."""
    for name, origin in origins.items():
        if f"--{name} " in message:
            return f" ({origin})"
    return ""


def resolved(settings: Any) -> dict[str, dict[str, Any]]:
    """Return the value and the origin of every setting, for ``run.json``.

    The origin is ``recipe`` if the user did not set the flag.
    """
    entries: dict[str, dict[str, Any]] = {}
    for config in configs_of(settings).values():
        for name in flags_of(config):
            origin = config.origins.get(name, "recipe")
            entries[name] = {"value": getattr(config, name), "from": origin}
    return entries


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows one name for each flag, although HF's parser also accepts dashes, and its default."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size((110, 24)).columns
        super().__init__(prog, max_help_position=38, width=min(120, columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.option_strings[0] == "-h":
            return super()._format_action_invocation(action)

        name = action.option_strings[0]
        value = _value_name(action)
        return f"{name} {value}" if value else name

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = _default_text(action)
        if not default or action.nargs == 0:
            return text
        return f"{text} (default: {default.replace('%', '%%')})"


def _is_switch(action: argparse.Action) -> bool:
    """Return whether a flag needs no value."""
    return action.nargs == 0 or isinstance(action.const, bool)


def _value_name(action: argparse.Action) -> str:
    """Return the name of the value of a flag, or the words that it takes; empty for a switch."""
    if _is_switch(action):
        return ""
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        placeholders: dict[Any, str] = {int: "N", float: "X"}
        last_word = action.option_strings[0].lstrip("-").rpartition("_")[2]
        placeholder = placeholders.get(action.type) or last_word.upper()
        value = str(action.metavar or placeholder)
    return f"{value} ..." if action.nargs == "+" else value


def _default_text(action: argparse.Action) -> str:
    """Return the default of a flag as the user would write it; empty if it has none."""
    is_off = action.default is None or action.default is False
    if is_off or action.default in ([], argparse.SUPPRESS):
        return ""
    if isinstance(action.default, list):
        return " ".join(map(str, action.default))
    return str(action.default)


class _Parsed(NamedTuple):
    """What argparse has read from the words of a command line.

    Attributes:
        values: the values of the flags in it.
        unknown: the words that belong to no known flag.
    """

    values: dict[str, Any]
    unknown: list[str]


class _Unknown(NamedTuple):
    """A flag or a key that the recipe does not have.

    Attributes:
        word: how the user wrote it.
        value: its value; ``None`` if there is none, or if it is no single word.
    """

    word: str
    value: str | None


class _Parser(HfArgumentParser):
    """A parser of the flags of several configs, whose errors are :class:`UserError`."""

    def __init__(
        self,
        defaults: Iterable[Config],
        description: str | None,
        show_hidden: bool,
    ) -> None:
        configs = list(defaults)
        self._recipe_values: dict[str, Any] = {}
        for config in configs:
            self._recipe_values |= {name: getattr(config, name) for name in flags_of(config)}
        super().__init__(
            [type(config) for config in configs],  # type: ignore[misc]  # they are dataclasses
            description=description,
            formatter_class=_Help,
            allow_abbrev=False,
            exit_on_error=False,
            usage="%(prog)s [--config FILE.yaml] [flags]",
        )
        self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with flags; flags on the command line take precedence",
        )
        self.add_argument(
            "--help_all",
            action="help",
            help="show this help with further flags, which are rarely needed",
        )
        self.add_argument(
            "--print_config",
            action="store_true",
            help="print every setting as YAML, which --config can read, and stop",
        )

        hidden = set()
        for config in configs:
            for name, field in flags_of(config).items():
                if field.metadata["hidden"]:
                    hidden.add(name)
        self.set_defaults(**self._recipe_values)

        self._help_texts = {action.dest: action.help or "" for action in reversed(self._actions)}
        for action in self._actions:
            is_hidden = action.dest in hidden and not show_hidden
            # If a switch is on by default, only its --no_... flag is shown.
            is_no_flag = action.option_strings[0].startswith("--no_")
            is_switch_on = action.default is True and not is_no_flag
            if is_hidden or is_switch_on:
                action.help = argparse.SUPPRESS

    def _add_dataclass_arguments(self, dtype: type[Config]) -> None:
        """Add the flags of a config, each to its group; HF's parser calls this."""
        types = get_type_hints(dtype)
        self._group(dtype._argument_group_name)  # comes before the groups of single flags
        for name, field_of_class in flags_of(dtype).items():
            field = copy.copy(field_of_class)
            field.type = types[name]
            if field.type in (bool, bool | None):
                # A switch that the recipe turns on needs a --no_... flag, whatever its class says.
                field.default = self._recipe_values[name]
            group = field.metadata["group"] or dtype._argument_group_name
            self._parse_dataclass_field(self._group(group), field)

    def _group(self, title: str) -> Any:
        """Return the group of flags with this title, which is new or belongs to another config."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    @staticmethod
    def _parse_dataclass_field(
        parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]"
    ) -> None:
        # HF passes the metadata on to argparse, which accepts only its own arguments.
        plain_field = copy.copy(field)
        metadata: dict[str, Any] = {"help": field.metadata["help"]}
        if field.metadata["metavar"] is not None:
            metadata["metavar"] = field.metadata["metavar"]
        if field.metadata["alias"] is not None:
            alias = f"--{field.metadata['alias']}"
            dashed = f"--{field.metadata['alias'].replace('_', '-')}"
            metadata["aliases"] = list(dict.fromkeys([alias, dashed]))
        plain_field.metadata = metadata  # type: ignore[assignment]
        if field.metadata["parse"] is not None:
            plain_field.type = field.metadata["parse"]
        if field.type == bool | None:
            _add_three_way_switch(parser, plain_field)
        else:
            HfArgumentParser._parse_dataclass_field(parser, plain_field)

    @property
    def flags(self) -> list[str]:
        """All flags, such as ``--max_steps``, in alphabetical order."""
        flags: set[str] = set()
        for action in self._actions:
            flags.update(option for option in action.option_strings if option.startswith("--"))
        return sorted(flags)

    @property
    def keys(self) -> list[str]:
        """The keys that a YAML file may have, in alphabetical order."""
        special = ("--config", "--help_all", "--help", "--print_config")
        return [option.removeprefix("--") for option in self.flags if option not in special]

    @property
    def list_keys(self) -> list[str]:
        """Those of them whose value may be a list."""
        actions = [self._option_string_actions[f"--{key}"] for key in self.keys]
        return [key for key, action in zip(self.keys, actions, strict=True) if action.nargs == "+"]

    def settings_by_group(self) -> dict[str, list[argparse.Action]]:
        """Return the flags that are settings, one for each setting, by the title of their group."""
        keys = self.keys
        groups: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:
            settings = [
                action
                for action in group._group_actions
                if action.dest in keys and action.option_strings[0] == f"--{action.dest}"
            ]
            if settings:
                groups[str(group.title)] = settings
        return groups

    def help_of(self, action: argparse.Action) -> str:
        """Return the help of a flag, also if ``--help`` does not show it."""
        return self._help_texts[action.dest].replace("%%", "%")

    def help_with_choices(self, action: argparse.Action) -> str:
        """Return the help of a flag, with the words that it takes if they are few."""
        text = self.help_of(action)
        if action.choices is None:
            return text
        return f"{text} (one of {', '.join(map(str, action.choices))})"

    def explicit_values(self, argv: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in ``argv``, and of no others, and what is wrong there.

        A flag with a wrong value is left out, and the other words are parsed all the same.

        Args:
            argv: the words of a command line.

        Returns:
            The values, and the problems for :meth:`refuse`.
        """
        problems: list[str] = []
        misread: list[str] = []  # unknown flags that argparse takes for others
        words = argv

        # argparse stops at the first wrong value. Leave its flag out, and parse the others.
        parsed = self._parse_words(words)
        while isinstance(parsed, argparse.ArgumentError):
            names = (parsed.argument_name or "").split("/")  # such as --max_steps/--max-steps
            is_written = not set(_options_in(words)).isdisjoint(names)
            if is_written:
                problems.append(self._describe_wrong_value(parsed, words, names))
                _, words = _take(names, words)
            else:
                # argparse reads an unknown flag such as -help as -h with a value.
                misread += [word for word in words if word.startswith(tuple(names))]
                words = [word for word in words if word not in misread]
            parsed = self._parse_words(words)

        problems += self._unknown_problems(misread + parsed.unknown)
        return parsed.values, problems

    def _parse_words(self, words: list[str]) -> "_Parsed | argparse.ArgumentError":
        """Parse the words of a command line; return the error of the first wrong value instead."""
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        try:
            namespace, unknown = self.parse_known_args(words, unset)
        except argparse.ArgumentError as error:
            return error
        values = {name: value for name, value in vars(namespace).items() if value is not _UNSET}
        return _Parsed(values, unknown)

    def _describe_wrong_value(
        self, error: argparse.ArgumentError, argv: list[str], names: list[str]
    ) -> str:
        """Return the message for a flag with these names, whose value is missing or wrong."""
        action = self._option_string_actions[names[0]]
        flag = f"--{action.dest}"
        if error.message.startswith("expected"):
            meaning = self._help_texts[action.dest].replace("%%", "%").partition(";")[0]
            return f"{flag} needs a value: {meaning}"

        problem = f"{flag}: {error.message}"
        values, _ = _take(names, argv)
        for value in values:
            hint = self._hint(f"{action.dest}={value.lower()}")
            if hint:
                return f"{problem}: {hint}."
        return problem

    def _hint(self, name: str) -> str | None:
        """Return what to write instead of a flag, or instead of a flag with a value."""
        own_flags = {action.option_strings[0] for action in self._actions}
        return hint_for(name, own_flags)

    def _unknown_problems(self, words: list[str]) -> list[str]:
        """Return the problems of the words of a command line that belong to no known flag."""
        if not words:
            return []

        problems = []
        first = words[0].partition("=")[0]
        # Words without dashes after an unknown flag are its values, and so are numbers below 0.
        flags = [word.partition("=")[0] for word in words if _FLAG.match(word)]
        if not first.startswith("-"):
            problems.append(f"'{first}' is neither a flag nor the value of one")
        elif not flags:
            flags = [first]
        unknown = []
        for flag in dict.fromkeys(flags):
            values, _ = _take([flag], words)
            unknown.append(_Unknown(flag, values[-1] if values else None))
        if unknown:
            problems.append(self.describe_unknown("flag", unknown))
        return problems

    def refuse(self, problems: list[str]) -> NoReturn:
        """Raise :class:`UserError` with all problems in one line.

        The line mentions ``--help``, unless each problem says what to do about it. Such a problem
        ends with a full stop.
        """
        message = "; ".join(problem.removesuffix(".") for problem in problems)
        if all(problem.endswith(".") for problem in problems):
            raise UserError(f"{message}.")
        self.error(message)

    def describe_unknown(self, kind: Literal["flag", "key"], unknown: list[_Unknown]) -> str:
        """Return the message about flags, or keys of a YAML file, that the recipe does not have.

        It ends with a full stop if there is a hint for each.
        """
        known = self.flags if kind == "flag" else self.keys
        hints = [self._hint_for_unknown(word, value) for word, value in unknown]
        shown = [word if kind == "flag" else f"'{word}'" for word, _ in unknown]

        if len(unknown) == 1:
            remark = f": {hints[0]}." if hints[0] else did_you_mean(unknown[0].word, known)
            return f"unknown {kind} {shown[0]}{remark}"

        described = []
        for (word, _), hint, text in zip(unknown, hints, shown, strict=True):
            remark = hint or did_you_mean(word, known).removeprefix(" - ")
            described.append(f"{text} ({remark})" if remark else text)
        full_stop = "." if all(hints) else ""
        return f"unknown {kind}s: {', '.join(described)}{full_stop}"

    def _hint_for_unknown(self, word: str, value: str | None) -> str | None:
        """Return what to write instead of a flag or a key that the recipe does not have."""
        name = _with_underscores(word).lstrip("-")
        switch = name.removeprefix("no_")
        action = self._option_string_actions.get(f"--{switch}")
        is_no_form = switch != name and action is not None and action.type is string_to_bool
        if is_no_form and value is None:
            return f"use --{switch} false"
        return self._hint(name)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UserError`; argparse calls this."""
        end = "" if message.endswith("?") else ";"
        raise UserError(f"{message}{end} --help lists the flags.")


def _options_in(argv: list[str]) -> list[str]:
    """Return the words of a command line that may be flags, without the values after ``=``."""
    return [word.partition("=")[0] for word in argv if word.startswith("-")]


def _take(names: Collection[str], argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the values of the flag with these names in ``argv``, and the words without it."""
    values = []
    others = []
    is_of_flag = False
    for word in argv:
        option, equals_sign, value = word.partition("=")
        if _FLAG.match(word):
            is_of_flag = option in names
            if is_of_flag and equals_sign:
                values.append(value)
        elif is_of_flag:
            values.append(word)
        if not is_of_flag:
            others.append(word)
    return values, others


def _with_underscores(option: str) -> str:
    """Return a flag such as ``--max-steps`` as ``--max_steps``."""
    name = option.lstrip("-")
    dashes = option[: len(option) - len(name)]
    return dashes + name.replace("-", "_")


def _add_three_way_switch(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]") -> None:
    """Add the flags of a field that is ``True``, ``False``, or ``None`` for auto.

    They are ``--name``, ``--name auto`` and ``--no_name``. HF's parser has no flag for ``None``.
    """
    dashed = field.name.replace("_", "-")
    parser.add_argument(
        *dict.fromkeys([f"--{field.name}", f"--{dashed}"]),
        nargs="?",
        const=True,
        default=field.default,
        type=_bool_or_auto,
        help=field.metadata["help"],
    )
    parser.add_argument(
        f"--no_{field.name}",
        f"--no-{dashed}",
        action="store_false",
        dest=field.name,
        default=field.default,
        # Of the two flags, --help shows the one that changes the default.
        help=field.metadata["help"] if field.default is True else argparse.SUPPRESS,
    )


def _bool_or_auto(text: str) -> bool | None:
    """Parse the value of a switch that may be ``auto``, which is ``None``."""
    if text.lower() == "auto":
        return None
    try:
        return bool(string_to_bool(text))  # type: ignore[no-untyped-call]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text} is not a value of this switch: use true, false or auto"
        ) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " - did you mean X?" with the nearest known name, or nothing if none is near.

    Names are compared without the dashes in front of them, which all flags have in common. If a
    word is the beginning of one name only, that name is meant.
    """
    full_names = {_with_underscores(name).lstrip("-"): name for name in known}
    typed = _with_underscores(word).lstrip("-")
    near = [name for name in full_names if name.startswith(typed)]
    if len(near) != 1:
        near = difflib.get_close_matches(typed, list(full_names), n=1)
    return f" - did you mean {full_names[near[0]]}?" if near else ""
