"""YAML files of flags: reading one, and writing one."""

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.parser import Flag, text_of
from llmtrain.errors import UserError

_YAML_NULL = ("", "~", "null", "Null", "NULL")
_HEADER = (
    "Settings for --config. A line such as #name: value shows a default; remove the # to set it. "
    "Some defaults change with other settings until you set them."
)


def text_of_settings(
    flags_by_title: Mapping[str, Sequence[Flag]], owners: Mapping[str, Any]
) -> str:
    """Return the text of a file with all settings.

    A setting that the user did not set is commented out. If it was not, reading the file would set
    it, and it would no longer change with other settings.

    Args:
        flags_by_title: the flags of each group, by the title of the group.
        owners: the :class:`~llmtrain.config.flags.Config` with the value of each flag, by the name
            of the flag.
    """
    lines = _comment(_HEADER)
    for title, flags in flags_by_title.items():
        lines += ["", f"# --- {title}"] if flags else []
        for flag in flags:
            owner = owners[flag.name]
            mark = "" if owner.is_set(flag.name) else "#"
            choices = f" (one of {', '.join(flag.choices)})" if flag.choices else ""
            value = getattr(owner, flag.name)
            if value is None and flag.kind is bool:
                value = "auto"
            lines += ["", *_comment(flag.metadata["help"] + choices)]
            lines.append(f"{mark}{flag.name}: {_yaml_of(value)}")
    return "\n".join(lines)


def settings_in(text: str) -> dict[str, Any]:
    """Return all settings in a text of :func:`text_of_settings`, defaults included."""
    # A line such as `#name: value` shows a default. A comment has a space after its mark.
    lines = re.findall(r"^#?(\w+): (.*)$", text, re.MULTILINE)
    return {name: yaml.safe_load(value) for name, value in lines}


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")


def _yaml_of(value: Any) -> str:
    """Return a value as YAML in one line."""
    if value in (None, []):
        return "null"  # a flag takes no empty list
    return yaml.safe_dump(
        [value],
        default_flow_style=True,
        # In double quotes a line break is written as \n. Otherwise it would take several lines.
        default_style='"' if "\n" in text_of(value) else None,
        allow_unicode=True,
        width=float("inf"),
    ).strip()[1:-1]


def read(path: str, flags: Collection[str]) -> dict[str, list[str]]:
    """Return the keys of a YAML file with the words that would follow their flags.

    Every scalar is read as the text in the file, because YAML's types would turn ``on`` into a
    boolean and ``12:30`` into a number. A key without a value keeps the recipe's default.

    Args:
        path: the path of the file.
        flags: the names of the recipe's flags. Other keys may have nested keys.

    Raises:
        UserError: if the file cannot be read, or does not consist of keys with values or lists.
    """
    try:
        tree = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"this is not YAML: {error}") from None
    if tree is None or _is_null(tree):
        return {}
    if not isinstance(tree, yaml.MappingNode):
        raise UserError("the file must consist of `flag: value` lines.")

    words_by_name: dict[str, list[str]] = {}
    for key_node, value_node in tree.value:
        name = str(key_node.value).replace("-", "_")
        if name in words_by_name:
            raise UserError(f"'{name}' is set twice; remove one of the lines.")
        if _is_null(value_node):
            continue
        is_list = isinstance(value_node, yaml.SequenceNode)
        items = value_node.value if is_list else [value_node]
        words = [str(item.value) for item in items if isinstance(item, yaml.ScalarNode)]
        if len(words) < len(items) and name in flags:
            raise UserError(f"'{name}' must be a value or a list, not nested keys.")
        if not items and name in flags:
            raise UserError(f"--{name} is an empty list; give a value or leave the key out.")
        words_by_name[name] = words
    return words_by_name


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _YAML_NULL
