"""Recipe defaults < YAML file < command line, into the dataclasses that own the settings. Knows no field.

A YAML file is written-down argv: every key becomes a flag and goes through the same parser, so there is one set of
names, one coercion and one kind of error for both.
"""

import argparse
import copy
import dataclasses
import difflib
import re
import shutil
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from llmtrain.errors import UserError

_UNSET = object()
_YAML_NULL = ("", "~", "null", "Null", "NULL")


def flag(default: Any, help: str) -> Any:
    """A dataclass field that is a command-line flag."""
    metadata = {"help": help.replace("%", "%%")}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(condition: bool, message: str) -> None:
    """Check one setting, in a dataclass's ``__post_init__``; raises :class:`UserError`."""
    if not condition:
        raise UserError(message)


def require_at_least(config: Any, minimum: float, *names: str) -> None:
    """Every named number must be finite and at least ``minimum``."""
    for name in names:
        value = getattr(config, name)
        require(minimum <= value < float("inf"), f"--{name} {value} is out of range: it must be at least {minimum}.")


def parse(*defaults: Any, argv: list[str] | None = None, description: str | None = None) -> tuple[Any, ...]:
    """Parse the command line into copies of ``defaults``, one dataclass instance each.

    ``--config FILE.yaml`` reads flags from a file; the command line wins over it. An unknown key, an unknown flag or
    an abbreviation is a :class:`UserError` with the nearest name. Where each value came from is kept for
    :func:`resolved`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(defaults, description)
    layers = [("command line", parser.given(argv))]
    config_file = layers[0][1].pop("config", None)
    layers[0][1].pop("debug", None)  # launch() looks for it itself, as it is to help with this function's errors too
    if config_file is not None:
        layers.insert(0, (config_file, parser.given(_argv_from_yaml(config_file, parser), source=config_file)))

    configs = []
    for default in defaults:
        changes: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for source, given in layers:
            for field in dataclasses.fields(default):
                if field.name in given:
                    changes[field.name], origins[field.name] = given[field.name], source
        try:
            config = dataclasses.replace(copy.deepcopy(default), **changes)
        except UserError as error:  # a value out of range: say which file it stands in
            files = [f" ({origins[name]})" for name in origins if f"--{name} " in str(error) and config_file]
            raise UserError(f"{error}{files[0] if files else ''}") from None
        config._origins = origins
        configs.append(config)
    return tuple(configs)


def given(config: Any, name: str) -> bool:
    """Whether a person has set this flag, on the command line or in a file."""
    return name in getattr(config, "_origins", {})


def resolved(*configs: Any) -> dict[str, dict[str, Any]]:
    """Every setting with its value and where it came from, for ``run.json``."""
    return {
        field.name: {
            "value": getattr(config, field.name),
            "from": getattr(config, "_origins", {}).get(field.name, "recipe"),
        }
        for config in configs
        for field in dataclasses.fields(config)
    }


class _Help(argparse.RawDescriptionHelpFormatter):
    """One name a flag (HF's parser also accepts dashes), the default where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=min(120, shutil.get_terminal_size((110, 24)).columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.option_strings[0] == "-h":
            return super()._format_action_invocation(action)
        name = action.option_strings[0]
        if action.nargs == 0 or isinstance(action.const, bool):
            return name
        if action.choices:
            return f"{name} {{{','.join(map(str, action.choices))}}}"
        if action.metavar:
            return f"{name} {action.metavar}"
        word = {int: "N", float: "X"}.get(action.type) or name.lstrip("-").rpartition("_")[2].upper()  # type: ignore[call-overload]
        return f"{name} {word}" + (" ..." if action.nargs == "+" else "")

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default is None or action.default == argparse.SUPPRESS or action.nargs == 0
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return text if silent else f"{text} (default: {default})"


class _Parser(HfArgumentParser):
    def __init__(self, defaults: Iterable[Any], description: str | None) -> None:
        super().__init__(
            [type(default) for default in defaults],  # type: ignore[misc]
            description=description,
            formatter_class=_Help,
            allow_abbrev=False,
            usage="%(prog)s [--config FILE.yaml] [flags]",
        )
        self.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins over it")
        self.add_argument("--debug", action="store_true", help="show where in the program an error arose")
        values = {
            field.name: getattr(default, field.name) for default in defaults for field in dataclasses.fields(default)
        }
        self.set_defaults(**values)

    @property
    def flags(self) -> list[str]:
        return sorted({option for action in self._actions for option in action.option_strings if option[:2] == "--"})

    def given(self, argv: list[str], source: str | None = None) -> dict[str, Any]:
        """What ``argv`` says, and nothing else: a name that it does not set is absent."""
        self._source = source
        blank = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        namespace, unknown = self.parse_known_args(argv, blank)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"'{word}' is not a flag and follows none")
            self.error(f"unknown flag {word}{did_you_mean(word, self.flags)}")
        return {name: value for name, value in vars(namespace).items() if value is not _UNSET}

    def error(self, message: str) -> NoReturn:
        place = f"{self._source}: " if self._source else ""
        message = re.sub(r"(--\w+)/--[\w-]+", r"\1", message.removeprefix("argument "))  # one name of two
        raise UserError(f"{place}{message}; --help lists the flags.")

    _source: str | None = None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " - did you mean X?", or nothing where no name is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" - did you mean {near[0]}?" if near else ""


def _argv_from_yaml(path: str, parser: _Parser) -> list[str]:
    """The flags that a YAML file writes down. Its scalars are taken as the words that they are: YAML's own reading
    would turn ``on`` into a boolean and ``12:30`` into a number."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the user's spelling stays in the error
            tree = yaml.compose(file.read(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} is not YAML: {error}") from None
    if tree is None or _is_null(tree):
        return []
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"--config {path} must be `flag: value` lines.")
    names = [option[2:] for option in parser.flags if option not in ("--config", "--debug", "--help")]
    argv, seen = [], set()
    for key_node, value in tree.value:
        key = str(key_node.value)
        if key not in names:
            raise UserError(f"{path}: unknown key '{key}'{did_you_mean(key, names)}")
        if key in seen:
            raise UserError(f"{path}: '{key}' stands there twice.")
        seen.add(key)
        if _is_null(value):  # leave out: the recipe's default holds
            continue
        words = [_word(node, key, path) for node in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
        if not words:
            raise UserError(f"{path}: --{key} is an empty list; give a value or leave the key out.")
        if key.startswith("no_"):  # `no_x: true` is the flag --no_x
            try:
                argv += [f"--{key}"] if string_to_bool(words[0]) else []
            except argparse.ArgumentTypeError:
                raise UserError(f"{path}: '{key}' must be true or false, not '{words[0]}'.") from None
        else:
            # `--key=value` keeps a value that begins with a dash a value
            argv += [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]
    return argv


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _YAML_NULL


def _word(node: yaml.Node, key: str, path: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{path}: '{key}' must be a value or a list, not nested keys.")
    return str(node.value)
