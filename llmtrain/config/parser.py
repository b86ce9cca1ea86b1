"""The parser of recipes and commands: argparse, with errors of one line."""

import argparse
import dataclasses
import difflib
import fnmatch
import functools
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

from llmtrain.errors import UserError

Program: TypeAlias = Literal["recipes", "commands"]

_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
_METAVARS = {int: "N", float: "X", bool: "BOOL"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a recipe, which follows from a field of a config.

    Attributes:
        name: the name, without dashes.
        kind: the type of its value, or of each value if it takes a list. ``bool`` needs no value.
        is_optional: whether its value may be ``None``. A switch then takes ``auto``.
        choices: the words that it takes; empty if it takes others.
        default: the default in this recipe.
        metavar: the name of its value, such as ``N``, or the words that it takes.
        metadata: the arguments of :func:`llmtrain.flag`.
    """

    name: str
    kind: type
    takes_list: bool
    is_optional: bool
    choices: tuple[str, ...]
    default: Any
    metavar: str
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, config: Any, field: "dataclasses.Field[Any]") -> "Flag":
        """Return the flag of a field of a :class:`~llmtrain.config.flags.Config`."""
        annotation: Any = field.type
        if isinstance(annotation, str):
            # The module of a recipe may be gone (:mod:`llmtrain.training.recipe_model`), so names
            # are looked up as the `__init__` of the dataclass does.
            annotation = get_type_hints(type(config).__init__)[field.name]

        # `X | None`: its value is optional. `list[X]`: it takes several words.
        is_union = get_origin(annotation) in (Union, UnionType)
        options = get_args(annotation) if is_union else (annotation,)
        kind = next(option for option in options if option is not NoneType)
        takes_list = get_origin(kind) is list
        if takes_list:
            [kind] = get_args(kind)
        # `Literal["a", "b"]`: it takes these words.
        choices = config.choices(field.name)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            kind = str
        has_parse = field.metadata["parse"] is not None
        if kind not in (str, int, float, bool) and not has_parse:
            raise TypeError(f"--{field.name}: a flag of type {kind} needs parse=...")

        if choices:
            metavar = "{" + ",".join(choices) + "}"
        elif field.metadata["metavar"]:
            metavar = field.metadata["metavar"]
        elif kind in _METAVARS and not has_parse:
            metavar = _METAVARS[kind]
        else:
            metavar = field.name.rpartition("_")[2].upper()
        return cls(
            name=field.name,
            kind=kind,
            takes_list=takes_list,
            is_optional=NoneType in options,
            choices=choices,
            default=getattr(config, field.name),
            metavar=metavar,
            metadata=field.metadata,
        )

    def convert(self, word: str) -> Any:
        """Return the value that a word stands for.

        Raises:
            UserError: if it stands for none.
        """
        if self.kind is bool and self.is_optional and word.lower() == "auto":
            return None
        convert = self.metadata["parse"] or (_boolean if self.kind is bool else self.kind)
        try:
            if not self.choices or word in self.choices:
                return convert(word)
            problem = f"invalid choice: '{word}' (choose from {', '.join(self.choices)})"
        except (ValueError, UserError) as error:
            problem = str(error)
            if convert is self.kind:
                problem = f"'{word}' is not a {'whole number' if convert is int else 'number'}"
        hint = hint_for(f"{self.name}={word.lower()}")
        raise UserError(f"--{self.name} {word}: {hint}." if hint else f"--{self.name}: {problem}")


def _boolean(word: str) -> bool:
    if word.lower() not in _BOOLEANS:
        raise ValueError(f"'{word}' is not a value of this switch: use true or false")
    return _BOOLEANS[word.lower()]


def text_of(value: Any) -> str:
    """Return the value of a flag as the user would write it; empty if there is none."""
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`UserError`.

    ``--max-steps`` is the same flag as ``--max_steps``. An abbreviation is an unknown flag.

    Attributes:
        program: whether it is for a recipe or for a command of ``llmtrain``.
        flags: the flags of a recipe by their names and aliases.
        sections: the flags of a recipe by their title in ``--help``.
    """

    def __init__(self, program: Program = "commands", **options: Any) -> None:
        layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=38)
        super().__init__(allow_abbrev=False, formatter_class=layout, **options)
        self.program = program
        self.flags: dict[str, Flag] = {}
        self.sections: dict[str, list[Flag]] = {}

    def add_flags(self, configs: Iterable[Any], *, show_hidden: bool = False) -> None:
        """Add the flags of a recipe.

        Args:
            configs: the sections of its settings, each a :class:`~llmtrain.config.flags.Config`.
            show_hidden: whether ``--help`` shows all of them.
        """
        for config in configs:
            self.sections.setdefault(config.group, [])  # before the titles of single flags
            for field in dataclasses.fields(config):
                flag = Flag.of(config, field)
                self.sections.setdefault(field.metadata["group"] or config.group, []).append(flag)
                self.flags |= {flag.name: flag, field.metadata["alias"] or flag.name: flag}

        for title, flags in self.sections.items():
            group = self.add_argument_group(title)
            for flag in flags:
                default = text_of(flag.default)
                text = flag.metadata["help"] + (f" (default: {default})" if default else "")
                is_shown = show_hidden or not flag.metadata["hidden"]
                is_switch = flag.kind is bool
                nargs = "?" if is_switch else None
                group.add_argument(
                    *[f"--{name}" for name in (flag.name, flag.metadata["alias"]) if name],
                    dest=flag.name,
                    type=flag.convert,
                    nargs="+" if flag.takes_list else nargs,
                    const=is_switch or None,
                    metavar=flag.metavar,
                    help=text.replace("%", "%%") if is_shown else argparse.SUPPRESS,
                )
                if is_switch:
                    options: Any = {"action": "store_false", "help": argparse.SUPPRESS}
                    group.add_argument(f"--no_{flag.name}", dest=flag.name, **options)

    def values_of(self, words_by_name: Mapping[str, list[str]]) -> dict[str, Any]:
        """Return the values of a recipe's flags, for the words that would follow them.

        Args:
            words_by_name: the words of each flag, by its name without dashes.

        Raises:
            UserError: if a name is unknown, or if a value is wrong.
        """
        unknown = [name for name in words_by_name if name not in self.flags]
        if unknown:
            self.refuse_unknown([f"--{name}={' '.join(words_by_name[name])}" for name in unknown])

        values: dict[str, Any] = {}
        for name, words in words_by_name.items():
            flag = self.flags[name]
            if flag.name in values:
                raise UserError(f"--{name} is another name of --{flag.name}; set one of them.")
            if len(words) != 1 and not flag.takes_list:
                raise UserError(f"--{name} takes a single value, not a list.")
            converted = [flag.convert(word) for word in words]
            values[flag.name] = converted if flag.takes_list else converted[0]
        return values

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = []
        for word in sys.argv[1:] if args is None else args:
            name = re.match(r"--[^\W\d][\w-]*(?==|\Z)", word)
            end = name.end() if name else 0
            words.append(word[:2] + word[2:end].replace("-", "_") + word[max(end, 2) :])
        self._words = words
        given = {word.partition("=")[0] for word in words}
        for alias, flag in self.flags.items():
            if alias != flag.name and {f"--{alias}", f"--{flag.name}"} <= given:
                raise UserError(f"--{alias} is another name of --{flag.name}; set one of them.")
        return super().parse_known_args(words, namespace)

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Raise :class:`UserError` for the words of a command line that no flag has taken."""
        if not words[0].startswith("-"):
            self.error(f"'{words[0]}' is neither a flag nor the value of one")

        values: dict[str, str] = {}
        for flag_and_value in re.split(r" (?=-\D)", " ".join(words)):
            flag, *value_words = re.split("[ =]", flag_and_value, maxsplit=1)
            values[flag] = " ".join(value_words)

        known = [option for option in self._option_string_actions if option not in values]
        described = []
        for flag, value in values.items():
            hint = hint_for(flag, known, self.program).replace("VALUE", value or "VALUE")
            described.append(flag + (f": {hint}" if hint else did_you_mean(flag, known)))
        self.error(f"unknown {'flags' if len(described) > 1 else 'flag'} {'; '.join(described)}")

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UserError` with a message that names the help."""
        if message.startswith("the following arguments are required"):
            # A misspelled flag may be the reason. Those of a recipe are not known here.
            unknown = [word for word in self._words if word.startswith("--")]
            unknown = [word for word in unknown if word not in self._option_string_actions]
            if unknown and self.get_default("flags") is None:
                self.refuse_unknown(unknown)
        end = "" if message.endswith("?") else ";"
        where = "--help lists the flags" if self.program == "recipes" else f"see {self.prog} --help"
        raise UserError(f"{message.removeprefix('argument ')}{end} {where}.")


# --- the replacement for a name that is not known: a hint, or the nearest known name


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " - did you mean X?" with the nearest known name, or nothing if none is near.

    Names are compared without the dashes in front of them, which all flags have in common. If a
    word is the beginning of one name only, that name is meant.
    """
    full_names = {_plain(name): name for name in known}
    typed = _plain(word)
    near = [name for name in full_names if name.startswith(typed)]
    if len(near) != 1:
        near = difflib.get_close_matches(typed, list(full_names), n=1, cutoff=0.72)
    if not near:
        return ""

    # A misspelling may lack many letters of a name, but has few others: teacher_model_name_or_path
    # is another flag than model_name_or_path.
    blocks = difflib.SequenceMatcher(None, near[0], typed).get_matching_blocks()
    other_letters = len(typed) - sum(block.size for block in blocks)
    if other_letters > max(1, len(typed) / 6):
        return ""
    return f" - did you mean {full_names[near[0]]}?"


def hint_for(name: str, flags: Collection[str] | None = None, program: Program = "recipes") -> str:
    """Return the hint for a name that a recipe or a command does not know, or nothing.

    Args:
        name: a flag, such as ``--lr``, or a flag with a value that it does not take, such as
            ``optim=adam``.
        flags: the known flags, such as ``--max_steps``. A hint counts only if they include all
            flags that it names. By default, every hint counts.
        program: whether a recipe or a command of ``llmtrain`` was started.
    """
    for pattern, hint in hints(program).items():
        own_words = re.sub(r"accelerate launch .* RECIPE|lm_eval .*", "", hint)
        is_known = flags is None or set(re.findall(r"--\w+", own_words)).issubset(flags)
        if is_known and fnmatch.fnmatchcase(_plain(name), pattern):
            return hint
    return ""


@functools.cache
def hints(program: Program) -> dict[str, str]:
    """Return the hint for each name, or for each pattern of names such as ``vllm_*``.

    The hints, for users of other programs, are in ``hints.yaml``.
    """
    import yaml  # which only a mistake needs

    text = Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8")
    hint_of_name: dict[str, str] = {}
    for names, hint in yaml.safe_load(text)[program].items():
        hint_of_name |= dict.fromkeys(names.split(", "), hint)
    return hint_of_name


def _plain(name: str) -> str:
    """Return a name without dashes, such as ``max_steps`` for ``--max-steps``."""
    return name.lstrip("-").replace("-", "_")
