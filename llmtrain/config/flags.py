"""Settings as dataclasses, whose fields are the flags of a recipe."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from llmtrain.console import say
from llmtrain.errors import UserError


class Config:
    """The base class of every dataclass of settings. Each of its fields is a flag.

    Attributes:
        group: the title in ``--help`` under which its flags are shown, unless a flag names another.
        affects: the parts of a run that its flags change, unless a flag names others. They are the
            words that :func:`flag` lists, separated by spaces.
        origins: where each flag that the user set comes from: ``command line``, the path of a YAML
            file, or an environment variable.
    """

    group: ClassVar[str] = ""
    affects: ClassVar[str] = "nowhere"
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
        """Return whether the user set this flag: in the command line, a file or the environment."""
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
        parse: turns a word on the command line into the value, or raises :class:`UserError`. By
            default, the type of the field does.
        alias: another name of the flag, which ``--help`` does not show.
        variable: an environment variable that sets the flag if neither ``--config`` nor the command
            line does. It has the words that would follow the flag, separated by spaces or commas.
    """
    metadata = {
        "help": help,
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
