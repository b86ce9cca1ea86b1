"""Recipe defaults < YAML file < command line, into the dataclasses that own the settings. Knows no field.

A YAML file is written-down argv: every key becomes a flag and goes through the same parser, so there is one set of
names, one coercion and one kind of error for both.
"""

import argparse
import copy
import dataclasses
import difflib
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from llmtrain.console import say
from llmtrain.errors import UserError

_UNSET = object()
_YAML_NULL = ("", "~", "null", "Null", "NULL")
S = TypeVar("S")


class Config:
    """The base of every dataclass of settings. Each of its fields is a flag."""

    _argument_group_name: ClassVar[str] = ""  # in --help; HF's parser asks for it by this name
    acts: ClassVar[str] = "nowhere"  # where in an update its flags act, unless one says otherwise
    origins: Mapping[
        str, str
    ] = {}  # sources of the flags that a person has set: the command line or a file

    def given(self, name: str) -> bool:
        """Return whether a person has set this flag, on the command line or in a file."""
        return name in self.origins

    def default(self, name: str, value: Any, why: str) -> None:
        """Set a flag that nobody has set, and say so."""
        if not self.given(name):
            setattr(self, name, value)
            say("default", f"--{name} {value:g}, of {why}")


def flag(default: Any, help: str, *, acts: str | None = None, hidden: bool = False) -> Any:
    """Return a dataclass field that is a command-line flag.

    ``acts`` names where in an update it acts, for ``llmtrain diff``. A ``hidden`` one is shown by --help_all alone.
    """
    metadata = {"help": help.replace("%", "%%"), "acts": acts, "hidden": hidden}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_at_least(config: Config, minimum: float, *names: str) -> None:
    """Raise :class:`UserError` unless every named number is finite and at least ``minimum``."""
    for name in names:
        value = getattr(config, name)
        if not minimum <= value < math.inf:  # so that NaN is refused, too
            raise UserError(f"--{name} {value} is out of range: it must be at least {minimum}.")


def configs_of(settings: Any) -> dict[str, Config]:
    """Return the configs that a dataclass of settings holds, by the names of its fields."""
    return {name: value for name, value in vars(settings).items() if isinstance(value, Config)}


def flags_of(config: Config | type[Config]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a config by the names of their flags."""
    return {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]  # all are dataclasses


def parse(defaults: S, argv: list[str] | None = None, description: str | None = None) -> S:
    """Parse the command line into a copy of ``defaults``, a dataclass of configs.

    ``--config FILE.yaml`` reads flags from a file; the command line wins over it. An unknown key, an unknown flag or
    an abbreviation is a :class:`UserError` with the nearest name. Each config keeps where its values came from.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    configs = configs_of(defaults)
    parser = _Parser(configs.values(), description, show_hidden="--help_all" in argv)
    layers = [("command line", parser.given(argv))]
    config_file = layers[0][1].pop("config", None)
    if config_file is not None:
        layers.insert(
            0, (config_file, parser.given(_argv_from_yaml(config_file, parser), source=config_file))
        )

    parsed: dict[str, Config] = {}
    for part, default in configs.items():
        names = flags_of(default).keys()
        changes = {
            name: value for _, given in layers for name, value in given.items() if name in names
        }
        origins = {name: source for source, given in layers for name in given if name in names}
        try:
            parsed[part] = dataclasses.replace(copy.deepcopy(default), **changes)  # type: ignore[type-var]
        except UserError as error:  # a value out of range: say which file it stands in
            files = [
                f" ({origins[name]})"
                for name in origins
                if f"--{name} " in str(error) and config_file
            ]
            raise UserError(f"{error}{files[0] if files else ''}") from None
        parsed[part].origins = origins
    return dataclasses.replace(defaults, **parsed)  # type: ignore[type-var]


def resolved(settings: Any) -> dict[str, dict[str, Any]]:
    """Return every setting with its value and where it came from, for ``run.json``."""
    return {
        name: {"value": getattr(config, name), "from": config.origins.get(name, "recipe")}
        for config in configs_of(settings).values()
        for name in flags_of(config)
    }


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows one name a flag (HF's parser also accepts dashes), and the default where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=38, width=min(120, shutil.get_terminal_size((110, 24)).columns)
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.option_strings[0] == "-h":
            return super()._format_action_invocation(action)
        name = action.option_strings[0]
        if action.nargs == 0 or isinstance(action.const, bool):
            return name
        known: dict[Any, str] = {int: "N", float: "X"}
        word = known.get(action.type) or name.lstrip("-").rpartition("_")[2].upper()
        return f"{name} {self._metavar_formatter(action, word)(1)[0]}" + (
            " ..." if action.nargs == "+" else ""
        )

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, False, [], argparse.SUPPRESS) or action.nargs == 0
        default = (
            " ".join(map(str, action.default))
            if isinstance(action.default, list)
            else "%(default)s"
        )
        return text if silent else f"{text} (default: {default})"


class _Parser(HfArgumentParser):
    def __init__(
        self, defaults: Iterable[Config], description: str | None, show_hidden: bool
    ) -> None:
        configs = [*defaults]
        super().__init__(
            [type(config) for config in configs],  # type: ignore[misc]  # they are dataclasses
            description=description,
            formatter_class=_Help,
            allow_abbrev=False,
            usage="%(prog)s [--config FILE.yaml] [flags]",
        )
        self.add_argument(
            "--config", metavar="FILE", help="YAML file of flags; the command line wins over it"
        )
        self.add_argument("--help_all", action="help", help="show the flags that commands use, too")
        self.set_defaults(
            **{name: getattr(config, name) for config in configs for name in flags_of(config)}
        )
        hidden = {
            name
            for one in configs
            for name, field in flags_of(one).items()
            if field.metadata["hidden"]
        }
        for action in self._actions:
            is_on = action.default is True and not action.option_strings[0].startswith("--no_")
            if is_on or (
                action.dest in hidden and not show_hidden
            ):  # of a switch that is on, --no_... is shown
                action.help = argparse.SUPPRESS

    @staticmethod
    def _parse_dataclass_field(
        parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]"
    ) -> None:
        plain = copy.copy(field)
        plain.metadata = {"help": field.metadata["help"]}  # type: ignore[assignment]  # argparse takes no other
        HfArgumentParser._parse_dataclass_field(parser, plain)

    @property
    def flags(self) -> list[str]:
        return sorted(
            {
                option
                for action in self._actions
                for option in action.option_strings
                if option[:2] == "--"
            }
        )

    def given(self, argv: list[str], source: str | None = None) -> dict[str, Any]:
        """Return what ``argv`` says, and nothing else: a name that it does not set is absent."""
        self.place = f"{source}: " if source else ""
        blank = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        namespace, unknown = self.parse_known_args(argv, blank)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"'{word}' is not a flag and follows none")
            self.error(f"unknown flag {word}{did_you_mean(word, self.flags)}")
        return {name: value for name, value in vars(namespace).items() if value is not _UNSET}

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            r"(--\w+)/--[\w-]+", r"\1", message.removeprefix("argument ")
        )  # one name of two
        raise UserError(f"{self.place}{message}; --help lists the flags.")

    place = ""  # before an error: the file that says it


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " - did you mean X?", or nothing where no name is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" - did you mean {near[0]}?" if near else ""


def _argv_from_yaml(path: str, parser: _Parser) -> list[str]:
    """Return the flags that a YAML file writes down.

    Every scalar is read as the text in the file: YAML's own types would turn ``on`` into a boolean
    and ``12:30`` into a number.
    """
    tree = _read_yaml(path)
    if tree is None or _is_null(tree):
        return []
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"--config {path} must be `flag: value` lines.")

    special = ("--config", "--help_all", "--help")
    names = [option.removeprefix("--") for option in parser.flags if option not in special]
    parser.place = f"{path}: "
    argv: list[str] = []
    seen = set()
    for key_node, value_node in tree.value:
        key = str(key_node.value)
        if key not in names:
            raise UserError(f"{path}: unknown key '{key}'{did_you_mean(key, names)}")
        if key in seen:
            raise UserError(f"{path}: '{key}' stands there twice.")
        seen.add(key)
        if not _is_null(value_node):  # null keeps the recipe's default
            argv += _flag_words(path, key, value_node)
    return argv


def _read_yaml(path: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML file, or ``None`` if the file is empty."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the user's spelling stays in the error
            return yaml.compose(file.read(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} is not YAML: {error}") from None


def _flag_words(path: str, key: str, node: yaml.Node) -> list[str]:
    """Return the words of a command line for one key of a YAML file and its value."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        raise UserError(f"{path}: '{key}' must be a value or a list, not nested keys.")
    words = [str(node.value) for node in nodes]
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
