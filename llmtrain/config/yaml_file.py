"""YAML files of flags: reading one, and writing one."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from llmtrain.errors import UserError

_YAML_NULL = ("", "~", "null", "Null", "NULL")
_COLUMNS = 100
_HEADER = (
    "Settings for --config. A line such as #name: value shows a default; remove the # to set it. "
    "Some defaults change with other settings until you set them."
)


class Entry(NamedTuple):
    """A setting to write to a file.

    Attributes:
        name: the name of the flag.
        value: the value; ``None`` or an empty list for none.
        help: the comment above the setting.
        is_set: whether the user set the flag. Otherwise the line is commented out.
    """

    name: str
    value: Any
    help: str
    is_set: bool


def text_of(groups: Mapping[str, Sequence[Entry]]) -> str:
    """Return the text of a file with these settings.

    A setting that the user did not set is commented out. If it was not, reading the file would set
    it, and it would no longer change with other settings.

    Args:
        groups: the settings of each group, by the title of the group.
    """
    lines = _comment(_HEADER)
    for title, entries in groups.items():
        lines += ["", f"# --- {title}"]
        for entry in entries:
            mark = "" if entry.is_set else "#"
            lines += ["", *_comment(entry.help), f"{mark}{entry.name}: {_yaml_of(entry.value)}"]
    return "\n".join(lines)


class Setting(NamedTuple):
    """A setting in a text that :func:`text_of` has written.

    Attributes:
        value: the value; ``None`` for none.
        is_set: whether the user set the flag.
    """

    value: Any
    is_set: bool


def settings_in(text: str) -> dict[str, Setting]:
    """Return the settings in a text that :func:`text_of` has written, defaults included."""
    settings = {}
    # A line such as `#name: value` shows a default. A comment has a space after its mark.
    for mark, name, value in re.findall(r"^(#?)(\w+): (.*)$", text, re.MULTILINE):
        settings[name] = Setting(value=yaml.safe_load(value), is_set=not mark)
    return settings


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=_COLUMNS,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml_of(value: Any) -> str:
    """Return a value as YAML in one line."""
    if value is None or value == []:
        return "null"  # a flag takes no empty list
    texts = value if isinstance(value, list) else [value]
    has_line_break = any("\n" in text for text in texts if isinstance(text, str))
    text: str = yaml.safe_dump(
        value,
        default_flow_style=True,
        # In double quotes a line break is written as \n. Otherwise it would take several lines.
        default_style='"' if has_line_break else None,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("...\n").rstrip("\n")  # the end of a document


class Content(NamedTuple):
    """The flags in a file.

    Attributes:
        flags: each flag with its words, as on a command line.
        unknown: the keys that are not flags.
        problems: error messages about the values of the other keys, without the path.
    """

    flags: list[tuple[str, list[str]]]
    unknown: list[str]
    problems: list[str]


def read(path: str, keys: Mapping[str, bool], named_by: str) -> Content:
    """Read the flags in a YAML file.

    Every scalar is read as the text in the file, because YAML's types would turn ``on`` into a
    boolean and ``12:30`` into a number.

    Args:
        path: the path of the file.
        keys: the keys that the file may have, and whether the value of each may be a list.
        named_by: what names the file, such as ``--config my.yaml``, for errors.

    Raises:
        UserError: if the file cannot be read.
    """
    content = Content(flags=[], unknown=[], problems=[])
    tree = _read_yaml(path, named_by)
    if tree is None or _is_null(tree):
        return content
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"{named_by} must consist of `flag: value` lines.")

    written = [str(key_node.value) for key_node, _ in tree.value]
    names = [key.replace("-", "_") for key in written]
    for name in dict.fromkeys(names):
        if name in keys and names.count(name) > 1:
            content.problems.append(f"'{name}' is set twice; remove one of the lines.")

    for key, name, (_, value_node) in zip(written, names, tree.value, strict=True):
        if name not in keys:
            content.unknown.append(key)
            continue
        if _is_null(value_node):  # null keeps the recipe's default
            continue
        try:
            words = _words_of(key, value_node)
        except UserError as error:
            content.problems.append(str(error))
            continue
        if len(words) > 1 and not keys[name]:
            content.problems.append(f"'{key}' takes a single value, not a list.")
            continue
        content.flags.append((f"--{name}", words))
    return content


def _read_yaml(path: str, named_by: str) -> yaml.Node | None:
    """Return the syntax tree of a YAML file, or ``None`` if the file is empty."""
    try:
        # Errors show the path as the user wrote it, which `Path` would change.
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return yaml.compose(file.read(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{named_by}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{named_by} is not YAML: {error}") from None


def _words_of(key: str, node: yaml.Node) -> list[str]:
    """Return the value of a key as the words after its flag on a command line."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in nodes):
        raise UserError(f"'{key}' must be a value or a list, not nested keys.")
    if not nodes:
        raise UserError(f"--{key} is an empty list; give a value or leave the key out.")
    return [str(item.value) for item in nodes]


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _YAML_NULL
