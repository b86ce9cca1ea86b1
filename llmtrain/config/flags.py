"""Settings as dataclasses, whose fields are the flags of a recipe."""

import copy
import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

from llmtrain.config.parser import Parser
from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.redaction import redacted

Affects: TypeAlias = Literal["data", "numbers", "nothing"]
COMMAND_LINE = "command line"  # the origin of a flag that is not from a file


class Config:
    """The base class of a section of settings: a dataclass whose fields are flags.

    Attributes:
        group: the title in ``--help`` under which its flags are shown, unless a flag names another.
        affects: what its flags change in a run, unless a flag says otherwise; see :func:`flag`.
        row_length_flag: the flag that makes rows shorter, if the section has one. The advice after
            an out-of-memory error names it.
        origins: where each flag that somebody set comes from: ``command line``, the path of a YAML
            file, or ``program`` (:meth:`set`).
    """

    group: ClassVar[str] = "flags of this recipe"
    affects: ClassVar[Affects] = "numbers"
    row_length_flag: ClassVar[str] = ""
    origins: Mapping[str, str] = {}

    def check_given(self) -> None:
        """Raise :class:`UserError` if settings of the user contradict each other.

        :func:`~llmtrain.config.command_line.parse` calls it. Unlike ``__post_init__``, it knows
        which settings the user set.
        """

    def choices(self, name: str) -> tuple[str, ...]:
        """Return the words that a flag of type ``str`` takes; empty if it takes any.

        A flag whose words are fixed has the type ``Literal`` instead.
        """
        return ()

    def is_set(self, name: str) -> bool:
        """Return whether the user set this flag, or the program with :meth:`set`."""
        return name in self.origins

    def set(self, **values: Any) -> None:
        """Set flags from a program, as a user would on the command line.

        A value that is only assigned is a default, which the recipe may replace by another one.

        Raises:
            UserError: if a value is wrong, as on the command line.
        """
        parser = Parser(program="recipes")
        parser.add_flags([self])
        words_by_name = {}
        for name, value in values.items():
            if name not in flags_of(self):
                raise AttributeError(f"{type(self).__name__} has no flag {name}")
            if value is not None or not parser.flags[name].is_optional:
                items = value if isinstance(value, list | tuple) else [value]
                words_by_name[name] = [str(item) for item in items]
        values |= parser.values_of(words_by_name)
        changed = self.with_given(values, dict.fromkeys(values, "program"))
        vars(self).update(vars(changed))

    def with_given(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        """Return a copy with its share of the values that somebody has set.

        Args:
            values: the values by the names of their flags.
            origins: where each value is from, as in ``origins`` above.

        Raises:
            UserError: if a value is out of range, or contradicts another one.
        """
        config = copy.deepcopy(self)
        own = {name: values[name] for name in flags_of(self) if name in values}
        if not own:
            return config
        try:
            config = dataclasses.replace(config, **own)  # type: ignore[type-var]  # a dataclass
            config.origins = {**self.origins, **{name: origins[name] for name in own}}
            config.check_given()
        except UserError as error:
            for name in own:
                if f"--{name} " in str(error) and origins[name] not in (COMMAND_LINE, "program"):
                    raise UserError(f"{error} ({origins[name]})") from None
            raise
        return config

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with those of some values whose names are flags of this section."""
        config = copy.copy(self)
        vars(config).update({name: values[name] for name in flags_of(self) if name in values})
        return config

    def set_default(self, name: str, value: Any, why: str) -> None:
        """Set a flag to ``value`` and log it, unless somebody set the flag.

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
    affects: Affects | None = None,
    hidden: bool = False,
    group: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    alias: str | None = None,
) -> Any:
    """Return a dataclass field that is a command-line flag.

    The annotation of the field is the type of the flag: ``str``, ``int``, ``float``, ``bool``, a
    ``Literal`` of texts, or a list of one of these. ``| None`` allows a default of ``None``.

    Args:
        default: the default value.
        help: the text in ``--help``.
        affects: what the flag changes in a run; by default, what those of the dataclass change.
            ``llmtrain diff`` looks for the cause of a difference there, and ``llmtrain compare``
            tells runs apart by it:

            - ``data``: which rows a run has, in which order, their tokens and their labels.
            - ``numbers``: weights, losses or gradients.
            - ``nothing``: at most their rounding. Changing it does not start a new run.
        hidden: show the flag only in ``--help_all``.
        group: the title in ``--help`` under which the flag is shown. By default, that of the
            dataclass.
        metavar: the name of the value in ``--help``. By default, the last word of the flag.
        parse: turns a word on the command line into a text, a number or a boolean, or raises
            :class:`ValueError`. By default, the type of the field does.
        alias: another name of the flag.
    """
    metadata = {
        "help": help,
        "affects": affects,
        "hidden": hidden,
        "group": group,
        "metavar": metavar,
        "parse": parse,
        "alias": alias,
    }
    if isinstance(default, list | dict | set):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require_range(
    config: object,
    *names: str,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise :class:`UserError` unless every named flag is in a range.

    With ``at_least``, it has to be finite, too.
    """
    limits = (
        ("at least", at_least, operator.ge),
        ("above", above, operator.gt),
        ("below", below or (math.inf if at_least is not None else None), operator.lt),
        ("at most", at_most, operator.le),
    )
    for name in names:
        value = getattr(config, name)
        for text, limit, is_within in limits:
            if limit is not None and not is_within(value, limit):  # so it is for NaN
                expected = "finite" if limit == math.inf else f"{text} {limit:,}"
                raise UserError(f"--{name} {value} is out of range: it must be {expected}.")


def configs_of(settings: Any) -> dict[str, Config]:
    """Return the sections of a dataclass of settings, by the names of its fields.

    Sections that a recipe declares in its own class come before those that the class inherits.
    """
    declared: dict[str, None] = {}
    for settings_class in type(settings).__mro__:
        declared |= dict.fromkeys(inspect.get_annotations(settings_class))
    values = vars(settings)
    return {name: values[name] for name in declared if isinstance(values.get(name), Config)}


def flags_of(config: Config | type[Config]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a config by the names of their flags."""
    return {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]


def value_of(settings: Any, name: str, default: Any) -> Any:
    """Return the value of a flag, or ``default`` if the recipe has no such flag."""
    for config in configs_of(settings).values():
        if name in flags_of(config):
            return getattr(config, name)
    return default


def resolved(settings: Any) -> dict[str, dict[str, Any]]:
    """Return the value and the origin of every setting, and what it affects, for ``run.json``.

    The origin is ``recipe`` if nobody set the flag.

    Raises:
        UserError: if the recipe says that a flag affects something else than :func:`flag` lists.
    """
    entries: dict[str, dict[str, Any]] = {}
    for config in configs_of(settings).values():
        for name, field in flags_of(config).items():
            affects = field.metadata["affects"] or config.affects
            if affects not in get_args(Affects):
                raise UserError(f"--{name} affects '{affects}'; write data, numbers or nothing.")
            entries[name] = {
                "value": getattr(config, name),
                "from": config.origins.get(name, "recipe"),
                "affects": affects,
            }
    return entries


def settings_fingerprint(settings: Any) -> JsonObject:
    """Return the values of the recipe's own flags that make another run.

    The flags of this package are left out: the fingerprint of a run has the data, the model, the
    objective and the optimizer that they lead to. So are flags that affect nothing.
    """
    entries = resolved(settings)
    values = {}
    for config in configs_of(settings).values():
        classes = [cls for cls in type(config).__mro__ if cls.__module__.startswith("llmtrain.")]
        for name in flags_of(config):
            changes_run = entries[name]["affects"] != "nothing"
            is_own = not any(name in inspect.get_annotations(cls) for cls in classes)
            if changes_run and is_own:
                values[name] = redacted(entries[name]["value"], name)
    return values
