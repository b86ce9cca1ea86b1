"""Write the reference pages that follow from the code: flags and commands.

    python docs/generate_reference.py

The pages are kept in the repository, so that they can be read without Sphinx. A test fails if one
of them is not what this program writes.
"""

import argparse
import re
import runpy
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from llmtrain.cli import GROUPS, build_parser
from llmtrain.config.command_line import recipe_parser
from llmtrain.config.flags import configs_of
from llmtrain.config.parser import Flag, text_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
RECIPES = ("gpt", "finetune", "preference")
_MARK = "<!-- python docs/generate_reference.py writes this page -->"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"flags.md": _flags_page(), "commands.md": _commands_page()}


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


# --- flags of the recipes

FlagByRecipe: TypeAlias = dict[str, Flag]


def _flags_page() -> str:
    lines = [
        "# Flags of the recipes",
        "",
        _MARK,
        "",
        "Each flag stands here once, with the recipes that have it. `python recipes/gpt.py --help` "
        "lists the flags that most runs need, and `--help_all` all of them; those are marked with "
        "\\*. In a YAML file for `--config`, a flag is a key without its dashes, and `--no_NAME` is "
        "`NAME: false`.",
        "",
    ]
    for title, flags in _flags_by_section().items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        for recipes in dict.fromkeys(tuple(flag_by_recipe) for flag_by_recipe in flags.values()):
            if recipes != RECIPES:
                names = " and ".join(f"`{recipe}.py`" for recipe in recipes)
                lines += [f"Only in {names}:", ""]
            lines += [_flag_line(flag) for flag in flags.values() if tuple(flag) == recipes]
            lines.append("")
    return "\n".join(lines)


def _flags_by_section() -> dict[str, dict[str, FlagByRecipe]]:
    """Return the flags by the title of their section and by their name."""
    sections_by_recipe = {}
    for recipe in RECIPES:
        module = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))
        sections_by_recipe[recipe] = recipe_parser(configs_of(module["DEFAULTS"])).sections

    # The last recipe has all sections.
    sections: dict[str, dict[str, FlagByRecipe]] = {
        title: {} for title in sections_by_recipe[RECIPES[-1]]
    }
    for recipe, recipe_sections in sections_by_recipe.items():
        for title, flags in recipe_sections.items():
            for flag in flags:
                sections[title].setdefault(flag.name, {})[recipe] = flag
    return sections


def _flag_line(flag_by_recipe: FlagByRecipe) -> str:
    flag = next(iter(flag_by_recipe.values()))
    value = "" if flag.choices or flag.kind is bool else flag.metavar
    if value and flag.takes_list:
        value += " ..."
    name = f"`--{flag.name} {value}`" if value else f"`--{flag.name}`"
    if flag.metadata["hidden"]:
        name += " \\*"

    # If the help texts of two recipes differ, the longer one has the default of its recipe.
    meaning = min((flag.metadata["help"] for flag in flag_by_recipe.values()), key=len)
    text = _with_code(meaning)
    if flag.choices:
        text += f" ({_code(flag.choices)})"
    if flag.metadata["alias"]:
        text += f"; also called `--{flag.metadata['alias']}`"
    if "(default: " not in meaning:
        text += _defaults(flag_by_recipe)
    return _item(name, text)


def _defaults(flag_by_recipe: FlagByRecipe) -> str:
    """Return the default of a flag in parentheses, by recipe if they differ."""
    default_by_recipe = {recipe: _default(flag) for recipe, flag in flag_by_recipe.items()}
    defaults = set(default_by_recipe.values())
    if defaults <= {"", "False"}:
        return ""
    if len(defaults) == 1:
        return f" (default: `{defaults.pop()}`)"
    texts = [f"{recipe} `{text}`" for recipe, text in default_by_recipe.items() if text]
    return f" (default: {', '.join(texts)})"


def _default(flag: Flag) -> str:
    is_auto = flag.default is None and flag.kind is bool
    return "auto" if is_auto else text_of(flag.default)


# --- commands


def _commands_page() -> str:
    parser = build_parser()
    lines = [
        "# Commands",
        "",
        _MARK,
        "",
        "`llmtrain COMMAND --help` prints the same. Every command takes `--json`, which prints its "
        "result as JSON.",
        "",
    ]
    parsers = _subcommands(parser)
    for group, commands in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in commands:
            lines += _command_section(name, parsers[name])
    return "\n".join(lines)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("llmtrain has commands")


def _command_section(name: str, command: argparse.ArgumentParser) -> list[str]:
    examples = textwrap.dedent((command.epilog or "").partition("\n")[2])
    lines = [
        f"### llmtrain {name}",
        "",
        _with_code((command.description or "").strip()),
        "",
        "```text",
        *examples.splitlines(),
        "```",
        "",
    ]
    for action in command._actions:
        if action.dest not in ("help", "json") and action.help != argparse.SUPPRESS:
            lines.append(_argument_line(action))
    return [*lines, ""]


def _argument_line(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    choices = list(map(str, action.choices or []))
    if action.option_strings and action.nargs != 0 and not choices:
        names += f" {action.metavar or action.dest.upper()}"

    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    meaning = _with_code(text)
    if choices:
        meaning += f" ({_code(choices)})"
    return _item(f"`{names}`", meaning)


# --- Markdown


def _item(name: str, meaning: str) -> str:
    """Return an item of a list."""
    meaning = " ".join(meaning.replace("<", "\\<").split())
    return f"- {name}: {meaning}"


def _with_code(text: str) -> str:
    """Return a text with its flags as code."""
    return re.sub(r"--\w+", lambda match: f"`{match[0]}`", text)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    main()
