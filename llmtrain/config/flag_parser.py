"""The parser of a recipe's flags: words to values, and a list of everything that is wrong."""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from llmtrain.config.flag_syntax import HELP, NO_SETTINGS, OPTIONS, Flag
from llmtrain.config.flags import Config, flags_of
from llmtrain.config.unknown_names import did_you_mean, hint_for
from llmtrain.errors import UserError

# The beginning of a flag. A number below 0 and a text with spaces, such as "- item", are values.
_FLAG = re.compile(r"-+[^\W\d][\w-]*(=|\Z)")
# A flag as the user wrote it, without a value after "=", and its values.
Words = tuple[str, list[str]]


class Parsed(NamedTuple):
    """The values of flags by name, and a message for everything that is wrong.

    A message that says what to do about a problem ends with a full stop.
    """

    values: dict[str, Any]
    problems: list[str]


class FlagParser:
    """Parses the flags of several configs. ``--max-steps`` is the same flag as ``--max_steps``.

    Raises:
        UserError: if two configs have a flag of the same name.
    """

    def __init__(self, configs: Mapping[str, Config]) -> None:
        _refuse_clashes(configs)
        # By the title of their group, in the order of --help.
        self.groups: dict[str, list[Flag]] = {OPTIONS: list(NO_SETTINGS)}
        for config in configs.values():
            self.groups.setdefault(config.group, [])  # before the groups of single flags
            for field in flags_of(config).values():
                flag = Flag.of(config, field)
                self.groups.setdefault(flag.group, []).append(flag)

        self._flags = {"-h": HELP}
        for flag in self.flags:
            self._flags[f"--{flag.name}"] = flag
            if flag.alias:
                self._flags[f"--{flag.alias}"] = flag
            if flag.is_switch and flag.group != OPTIONS:
                self._flags[f"--no_{flag.name}"] = flag

    @property
    def flags(self) -> list[Flag]:
        """All flags."""
        return list(itertools.chain.from_iterable(self.groups.values()))

    @property
    def settings(self) -> dict[str, list[Flag]]:
        """The flags that are settings, by the title of their group."""
        return {title: flags for title, flags in self.groups.items() if flags and title != OPTIONS}

    @property
    def keys(self) -> dict[str, bool]:
        """The keys that a YAML file may have, and whether each takes a list."""
        return {
            option.lstrip("-"): flag.takes_list
            for option, flag in self._flags.items()
            if flag.group != OPTIONS
        }

    def parse(self, words: list[str]) -> Parsed:
        """Return the values of the flags in a command line, and of no others."""
        return self.parse_flags(_split(words))

    def parse_flags(self, flags: Iterable[Words]) -> Parsed:
        """Return the values of flags, each with its words."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        stray_words: list[str] = []
        unknown: list[str] = []
        for option, words in flags:
            name = _with_underscores(option)
            flag = self._flags.get(name)
            if not option:
                stray_words += words
                continue
            if flag is None:
                unknown.append(option)  # with its words
                continue

            own_words = words if flag.takes_list else words[:1]
            stray_words += words[len(own_words) :]
            try:
                value = self._value(flag, own_words)
            except UserError as error:
                problems.append(str(error))
                continue
            if name == f"--no_{flag.name}":
                if value is None:
                    problems.append(f"{name} takes no auto; use --{flag.name} auto.")
                    continue
                value = not value
            values[flag.name] = value

        if stray_words:
            problems.append(f"'{stray_words[0]}' is neither a flag nor the value of one")
        if unknown:
            problems.append(self.describe_unknown("flag", list(dict.fromkeys(unknown))))
        return Parsed(values, problems)

    def _value(self, flag: Flag, words: list[str]) -> Any:
        """Return the value for the words after a flag.

        Raises:
            UserError: if it is missing or wrong.
        """
        if not words and not flag.is_switch:
            meaning = flag.help.partition(";")[0]
            raise UserError(f"--{flag.name} needs a value: {meaning}")
        try:
            return flag.value_of(words)
        except UserError as error:
            problem = f"--{flag.name}: {error}"
            hints = [hint_for(f"{flag.name}={word.lower()}", self._flags) for word in words]
            hint = next(filter(None, hints), "")
            raise UserError(f"{problem}: {hint}." if hint else problem) from None

    def describe_unknown(self, kind: Literal["flag", "key"], words: Collection[str]) -> str:
        """Return the message about flags, or keys of a YAML file, that the recipe does not have.

        It ends with a full stop if there is a hint for each.
        """
        known: Collection[str] = self._flags if kind == "flag" else self.keys
        hints = [hint_for(word, self._flags) for word in words]
        described = []
        for word, hint in zip(words, hints, strict=True):
            shown = word if kind == "flag" else f"'{word}'"
            suggestion = f": {hint}" if hint else did_you_mean(word, known)
            if suggestion and len(words) > 1:
                suggestion = f" ({suggestion.lstrip(' :-')})"
            described.append(f"{shown}{suggestion}")

        beginning = f"unknown {kind}s:" if len(words) > 1 else f"unknown {kind}"
        full_stop = "." if all(hints) else ""
        return f"{beginning} {', '.join(described)}{full_stop}"


def _refuse_clashes(configs: Mapping[str, Config]) -> None:
    """Raise :class:`UserError` if two sections of the settings have a flag of the same name.

    Args:
        configs: the sections, by the names of their fields.
    """
    owners = {flag.name: "the options of every recipe" for flag in NO_SETTINGS}
    for section, config in configs.items():
        owner = f"{section} ({type(config).__name__})"
        for name, field in flags_of(config).items():
            names = [name, field.metadata["alias"]]
            if Flag.of(config, field).is_switch:
                names.append(f"no_{name}")
            for option in filter(None, names):
                if option in owners:
                    raise UserError(
                        f"--{option} is a flag of {owners[option]} and of {owner}; rename one of "
                        "them."
                    )
                owners[option] = owner


def refuse(problems: list[str]) -> NoReturn:
    """Raise :class:`UserError` with all problems in one line.

    The line mentions ``--help``, unless each problem says what to do about it. Such a problem ends
    with a full stop.
    """
    message = "; ".join(problem.removesuffix(".") for problem in problems)
    if all(problem.endswith(".") for problem in problems):
        raise UserError(f"{message}.")
    end = "" if message.endswith("?") else ";"
    raise UserError(f"{message}{end} --help lists the flags.")


def _split(words: Iterable[str]) -> list[Words]:
    """Return each flag of a command line with its words, after those that belong to none."""
    flags: list[Words] = [("", [])]
    for word in words:
        if _FLAG.match(word):
            option, equals_sign, value = word.partition("=")
            flags.append((option, [value] if equals_sign else []))
        else:
            flags[-1][1].append(word)
    return flags


def _with_underscores(option: str) -> str:
    """Return a flag such as ``--max-steps`` as ``--max_steps``."""
    name = option.lstrip("-")
    dashes = option[: len(option) - len(name)]
    return dashes + name.replace("-", "_")
