"""The syntax of a flag and its value, which follows from the field of a config."""

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from llmtrain.errors import UserError

OPTIONS = "options"  # the title in --help of the flags that are no settings
_TYPES = (str, int, float, bool)
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}


@dataclass(frozen=True)
class Flag:
    """A flag of a recipe.

    Attributes:
        kind: the type of its value, or of each value if it takes a list.
        choices: the words that it takes; empty if it takes others.
        is_optional: whether a program may set it to ``None``.
        convert: turns a word into the value; ``None`` if ``kind`` does.
    """

    name: str  # without dashes
    help: str
    group: str
    kind: type
    default: Any = None  # in this recipe
    choices: tuple[str, ...] = ()
    takes_list: bool = False
    is_optional: bool = False
    alias: str | None = None
    metavar: str | None = None
    convert: Callable[[str], Any] | None = None
    is_hidden: bool = False  # except in --help_all
    variable: str | None = None  # of the environment

    @classmethod
    def of(cls, config: Any, field: "Field[Any]") -> "Flag":
        """Return the flag of a field of a :class:`~llmtrain.config.flags.Config`."""
        kind = _annotation(config, field.name)
        types = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
        is_optional = NoneType in types
        if is_optional:
            kind = next(option for option in types if option is not NoneType)
        takes_list = get_origin(kind) is list
        if takes_list:
            kind = get_args(kind)[0]
        is_literal = get_origin(kind) is Literal
        choices = get_args(kind) if is_literal else config.choices(field.name)

        metadata = field.metadata
        is_simple = kind in _TYPES or any(isinstance(choice, str) for choice in choices)
        if not is_simple and metadata["parse"] is None:
            raise UserError(
                f"{type(config).__name__}.{field.name}: a flag without parse=... is a str, int, "
                "float or bool, a Literal of texts, or a list of one of them."
            )
        return cls(
            name=field.name,
            help=metadata["help"],
            group=metadata["group"] or config.group,
            kind=kind if isinstance(kind, type) else str,
            default=getattr(config, field.name),
            choices=choices,
            takes_list=takes_list,
            is_optional=is_optional,
            alias=metadata["alias"],
            metavar=metadata["metavar"],
            convert=metadata["parse"],
            is_hidden=metadata["hidden"],
            variable=metadata["variable"],
        )

    @property
    def takes_auto(self) -> bool:
        """Whether a switch also takes ``auto``, which is ``None``."""
        return self.is_switch and self.is_optional

    @property
    def is_switch(self) -> bool:
        """Whether it needs no value."""
        return self.kind is bool

    @property
    def shown_name(self) -> str:
        """The flag as ``--help`` shows it: ``--no_NAME`` for a switch that the recipe turns on."""
        return f"--no_{self.name}" if self.default is True else f"--{self.name}"

    @property
    def value_name(self) -> str:
        """The name of its value, such as ``N``, or the words that it takes; empty for a switch."""
        if self.is_switch:
            return ""
        if self.choices:
            name = "{" + ",".join(self.choices) + "}"
        elif self.metavar:
            name = self.metavar
        elif self.convert is None and self.kind in (int, float):
            name = "N" if self.kind is int else "X"
        else:
            name = self.name.rpartition("_")[2].upper()
        return f"{name} ..." if self.takes_list else name

    @property
    def default_text(self) -> str:
        """The default as the user would write it; empty for a switch, and if there is none."""
        if self.is_switch or self.default is None or self.default == []:
            return ""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        return str(self.default)

    def given(self, value: Any) -> Any:
        """Return a value that a program sets, after the checks of a command line.

        Raises:
            UserError: if it is wrong.
        """
        if value is None:
            if self.is_optional:
                return None
            raise UserError(f"--{self.name} needs a value, not None.")
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != 1 and not self.takes_list:
            raise UserError(f"--{self.name} takes a single value, not {value!r}.")
        try:
            return self.value_of([str(item) for item in values])
        except UserError as error:
            raise UserError(f"--{self.name}: {str(error).removesuffix('.')}.") from None

    def value_of(self, words: list[str]) -> Any:
        """Return the value for the words after the flag.

        Raises:
            UserError: if there is none, or if it is wrong.
        """
        if not words and self.is_switch:
            return True
        values = [self._value_of_word(word) for word in words]
        return values if self.takes_list else values[0]

    def _value_of_word(self, word: str) -> Any:
        if self.is_switch and self.convert is None:
            return self._boolean(word)
        if self.choices and word not in self.choices:
            raise UserError(f"invalid choice: '{word}' (choose from {', '.join(self.choices)})")
        try:
            return self.kind(word) if self.convert is None else self.convert(word)
        except ValueError:
            raise UserError(f"invalid {self.kind.__name__} value: '{word}'") from None

    def _boolean(self, word: str) -> bool | None:
        if self.takes_auto and word.lower() == "auto":
            return None
        if word.lower() not in _BOOLEANS:
            values = "true, false or auto" if self.takes_auto else "true or false"
            raise UserError(f"'{word}' is not a value of this switch: use {values}")
        return _BOOLEANS[word.lower()]


def _annotation(config: Any, name: str) -> Any:
    """Return the type of a flag.

    A recipe's module may be gone when its flags are parsed (:mod:`llmtrain.training.recipe_model`),
    so names in the annotation are looked up as the ``__init__`` of its dataclass does.
    """
    owner: Any = next(cls for cls in type(config).__mro__ if name in inspect.get_annotations(cls))
    names = owner.__init__.__globals__
    try:
        return inspect.get_annotations(owner, globals=names, eval_str=True)[name]
    except NameError as error:
        raise UserError(f"{owner.__name__}.{name} has an unknown annotation: {error}.") from None


HELP = Flag(name="help", help="show this help message and exit", group=OPTIONS, kind=bool)
NO_SETTINGS = (
    HELP,
    Flag(
        name="config",
        help="YAML file with flags; flags on the command line take precedence",
        group=OPTIONS,
        kind=str,
        metavar="FILE",
    ),
    Flag(
        name="help_all",
        help="show this help with further flags, which are rarely needed",
        group=OPTIONS,
        kind=bool,
    ),
    Flag(
        name="print_config",
        help="print every setting as YAML, which --config can read, and stop",
        group=OPTIONS,
        kind=bool,
    ),
)
