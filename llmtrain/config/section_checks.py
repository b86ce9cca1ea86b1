"""Mistakes in the sections of settings that a recipe adds, each of them an error in one line."""

import dataclasses
from typing import Any

from llmtrain.config.flag_syntax import Flag
from llmtrain.config.flags import EFFECTS, Config, configs_of, effects_of, flags_of
from llmtrain.config.unknown_names import did_you_mean
from llmtrain.errors import UserError

_PLAIN_TYPES = (str, int, float, bool)


def check_sections(settings: Any) -> None:
    """Check that every section of some settings can be flags.

    Raises:
        UserError: if a section, or a flag of it, is not written as :class:`Config` describes.
    """
    _check_settings(settings)
    for config in configs_of(settings).values():
        _check_decorated(type(config))
        for field in flags_of(config).values():
            _check_flag(config, field)


def _check_settings(settings: Any) -> None:
    """Check that everything in the settings is a section."""
    name_of_class = type(settings).__name__
    _check_decorated(type(settings))
    for name, value in vars(settings).items():
        if value is not None and not isinstance(value, Config):
            raise UserError(
                f"{name_of_class}.{name} is of type {type(value).__name__}, but a section of "
                "settings is an lt.Config. Make a flag a field of a section."
            )

    sections = configs_of(settings)
    for name, value in vars(type(settings)).items():
        if isinstance(value, Config) and name not in sections:
            section = type(value).__name__
            raise UserError(
                f"{name_of_class}.{name} has no annotation, so it is no section: write {name}: "
                f"{section} = field(default_factory={section})."
            )


def _check_decorated(cls: type) -> None:
    """Check that a class and those that it inherits from are dataclasses."""
    for base in cls.__mro__:
        # The decorator replaces or removes them.
        has_fields = any(isinstance(value, dataclasses.Field) for value in vars(base).values())
        if has_fields or not dataclasses.is_dataclass(cls):
            raise UserError(f"{base.__name__} is no dataclass: write @dataclass above the class.")


def _check_flag(config: Config, field: "dataclasses.Field[Any]") -> None:
    """Check a field of a section."""
    name = f"{type(config).__name__}.{field.name}"
    default = getattr(config, field.name)
    if "help" not in field.metadata:
        annotation = getattr(field.type, "__name__", field.type)
        raise UserError(
            f"{name} is no flag: write {field.name}: {annotation} = lt.flag({default!r}, "
            '"what it is").'
        )
    if hasattr(Config, field.name):
        raise UserError(f"{name}: lt.Config has something else of this name; rename the flag.")

    for word in effects_of(config, field.name):
        if word not in EFFECTS:
            raise UserError(
                f"{name} affects '{word}', which is no part of a run"
                f"{did_you_mean(word, EFFECTS) or '.'} The parts are {', '.join(EFFECTS)}."
            )
    Flag.of(config, field)  # it checks the annotation
    values = default if isinstance(default, list) else [default]
    if not all(value is None or type(value) in _PLAIN_TYPES for value in values):
        raise UserError(f"{name} has the default {default!r}, which is no text, number or boolean.")
