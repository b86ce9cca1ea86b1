"""Settings as dataclasses: a recipe's defaults, overridden by a YAML file and the command line.

A key in a YAML file becomes the flag of the same name, and passes through the same parser. So both
have the same names, the same conversions and the same errors. This module knows no particular flag.
"""

import argparse
import copy
import dataclasses
import difflib
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from llmtrain.console import say
from llmtrain.errors import UserError

_UNSET = object()
COMMAND_LINE = "command line"  # the origin of a flag that is not from a file
_YAML_NULL = ("", "~", "null", "Null", "NULL")
S = TypeVar("S")


class Config:
    """The base class of every dataclass of settings. Each of its fields is a flag.

    Attributes:
        affects: the parts of a run that its flags change, unless a flag names others. They are the
            words that :func:`flag` lists, separated by spaces.
        origins: where each flag that the user set comes from: ``command line``, or the path of a
            YAML file.
    """

    _argument_group_name: ClassVar[str] = ""  # the title in --help, under the name that HF expects
    affects: ClassVar[str] = "nowhere"
    origins: Mapping[str, str] = {}

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
    parse: Callable[[str], Any] | None = None,
    alias: str | None = None,
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
              than rounding errors, so it is never reported as a cause.
            - ``nowhere``: no numbers of the run, as with logging. ``llmtrain diff`` leaves these
              settings out.
        hidden: show the flag only in ``--help_all``.
        parse: turns the word on the command line into the value, or raises
            ``argparse.ArgumentTypeError``. By default, the type of the field does.
        alias: another name of the flag, which ``--help`` does not show.
    """
    metadata = {
        "help": help.replace("%", "%%"),
        "affects": affects,
        "hidden": hidden,
        "parse": parse,
        "alias": alias,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_at_least(config: Config, minimum: float, *names: str) -> None:
    """Raise :class:`UserError` unless every named flag is finite and at least ``minimum``."""
    for name in names:
        value = getattr(config, name)
        is_valid = minimum <= value < math.inf  # False for NaN
        if not is_valid:
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

    ``--config FILE.yaml`` reads flags from a file. Flags on the command line take precedence. Each
    config of the result records in ``origins`` where its values come from.

    Args:
        defaults: a dataclass of configs, the defaults of a recipe.
        argv: the words of the command line; by default, those of this process.
        description: the text at the top of ``--help``.

    Raises:
        UserError: if a value is wrong, or if a flag or key is unknown or abbreviated. The message
            then suggests the nearest name.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    configs = configs_of(defaults)
    parser = _Parser(configs.values(), description, show_hidden="--help_all" in argv)

    values = parser.explicit_values(argv)
    config_file = values.pop("config", None)
    origins = dict.fromkeys(values, COMMAND_LINE)
    if config_file is not None:
        file_argv = _argv_from_yaml(config_file, parser)
        file_values = parser.explicit_values(file_argv, source=config_file)
        values = file_values | values
        origins = dict.fromkeys(file_values, config_file) | origins

    parsed: dict[str, Config] = {}
    for part, default in configs.items():
        names = flags_of(default).keys()
        changes = {name: value for name, value in values.items() if name in names}
        own_origins = {name: origin for name, origin in origins.items() if name in names}
        try:
            copied = copy.deepcopy(default)
            config = dataclasses.replace(copied, **changes)  # type: ignore[type-var]
        except UserError as error:  # a value is out of range
            source = _source_of_error(str(error), own_origins) if config_file else ""
            raise UserError(f"{error}{source}") from None
        config.origins = own_origins
        parsed[part] = config
    return dataclasses.replace(defaults, **parsed)  # type: ignore[type-var]


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
            entries[name] = {
                "value": getattr(config, name),
                "from": config.origins.get(name, "recipe"),
            }
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
        is_switch = action.nargs == 0 or isinstance(action.const, bool)
        if is_switch:
            return name
        placeholders: dict[Any, str] = {int: "N", float: "X"}
        last_word = name.lstrip("-").rpartition("_")[2]
        placeholder = placeholders.get(action.type) or last_word.upper()
        value = self._metavar_formatter(action, placeholder)(1)[0]
        ellipsis = " ..." if action.nargs == "+" else ""
        return f"{name} {value}{ellipsis}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_no_default = action.default in (None, False, [], argparse.SUPPRESS)
        if has_no_default or action.nargs == 0:
            return text
        if isinstance(action.default, list):
            default = " ".join(map(str, action.default))
        else:
            default = "%(default)s"
        return f"{text} (default: {default})"


class _Parser(HfArgumentParser):
    """A parser of the flags of several configs, whose errors are :class:`UserError`."""

    # Begins every error message. If the flags are from a file, it names the file.
    _error_prefix = ""

    def __init__(
        self, defaults: Iterable[Config], description: str | None, show_hidden: bool
    ) -> None:
        configs = list(defaults)
        super().__init__(
            [type(config) for config in configs],  # type: ignore[misc]  # they are dataclasses
            description=description,
            formatter_class=_Help,
            allow_abbrev=False,
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

        values = {}
        hidden = set()
        for config in configs:
            for name, field in flags_of(config).items():
                values[name] = getattr(config, name)
                if field.metadata["hidden"]:
                    hidden.add(name)
        self.set_defaults(**values)

        for action in self._actions:
            is_hidden = action.dest in hidden and not show_hidden
            # If a switch is on by default, only its --no_... flag is shown.
            is_no_flag = action.option_strings[0].startswith("--no_")
            is_switch_on = action.default is True and not is_no_flag
            if is_hidden or is_switch_on:
                action.help = argparse.SUPPRESS

    @staticmethod
    def _parse_dataclass_field(
        parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]"
    ) -> None:
        # HF passes the metadata on to argparse, which accepts only its own arguments.
        plain_field = copy.copy(field)
        metadata: dict[str, Any] = {"help": field.metadata["help"]}
        if field.metadata["alias"] is not None:
            metadata["aliases"] = [f"--{field.metadata['alias']}"]
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

    def explicit_values(self, argv: list[str], source: str | None = None) -> dict[str, Any]:
        """Return the values of the flags in ``argv``, and of no others.

        Args:
            argv: the words of a command line.
            source: the file that they are from, for error messages.
        """
        self._error_prefix = f"{source}: " if source else ""
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        namespace, unknown = self.parse_known_args(argv, unset)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"'{word}' is neither a flag nor the value of one")
            self.error(f"unknown flag {word}{did_you_mean(word, self.flags)}")
        return {name: value for name, value in vars(namespace).items() if value is not _UNSET}

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UserError`; argparse calls this."""
        message = message.removeprefix("argument ")
        # A flag has several names, such as --max_steps/--max-steps. Show the first.
        message = re.sub(r"(--\w+)(/--[\w-]+)+", r"\1", message)
        raise UserError(f"{self._error_prefix}{message}; --help lists the flags.")


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
        help=argparse.SUPPRESS,  # the help of --name explains it
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
    """Return " - did you mean X?" with the nearest known name, or nothing if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" - did you mean {near[0]}?" if near else ""


def _argv_from_yaml(path: str, parser: _Parser) -> list[str]:
    """Return the flags in a YAML file as the words of a command line.

    Every scalar is read as the text in the file, because YAML's types would turn ``on`` into a
    boolean and ``12:30`` into a number.
    """
    tree = _read_yaml(path)
    if tree is None or _is_null(tree):
        return []
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"--config {path} must consist of `flag: value` lines.")

    special = ("--config", "--help_all", "--help")
    names = [option.removeprefix("--") for option in parser.flags if option not in special]
    argv: list[str] = []
    keys = set()
    for key_node, value_node in tree.value:
        key = str(key_node.value)
        if key not in names:
            raise UserError(f"{path}: unknown key '{key}'{did_you_mean(key, names)}")
        if key in keys:
            raise UserError(f"{path}: '{key}' is set twice; remove one of the lines.")
        keys.add(key)
        if not _is_null(value_node):  # null keeps the recipe's default
            argv += _flag_words(path, key, value_node)
    return argv


def _read_yaml(path: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML file, or ``None`` if the file is empty."""
    try:
        # Errors show the path as the user wrote it, which `Path` would change.
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return yaml.compose(file.read(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} is not YAML: {error}") from None


def _flag_words(path: str, key: str, node: yaml.Node) -> list[str]:
    """Return a key of a YAML file and its value as the words of a command line."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in nodes):
        raise UserError(f"{path}: '{key}' must be a value or a list, not nested keys.")
    words = [str(item.value) for item in nodes]
    if not words:
        raise UserError(f"{path}: --{key} is an empty list; give a value or leave the key out.")

    if key.startswith("no_"):  # `no_x: true` is the flag --no_x, which takes no value
        try:
            is_set = string_to_bool(words[0])  # type: ignore[no-untyped-call]
        except argparse.ArgumentTypeError:
            raise UserError(f"{path}: '{key}' must be true or false, not '{words[0]}'.") from None
        return [f"--{key}"] if is_set else []
    if len(words) == 1:
        return [f"--{key}={words[0]}"]  # with a space, a value such as -1 would look like a flag
    return [f"--{key}", *words]


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _YAML_NULL
