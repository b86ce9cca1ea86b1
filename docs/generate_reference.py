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
    texts = {f"{recipe}.md": _recipe_page(recipe) for recipe in RECIPES}
    texts["commands.md"] = _commands_page()
    return texts


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


# --- recipes


def _recipe_page(recipe: str) -> str:
    module = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))
    summary = module["__doc__"].strip().split("\n\n")[0]
    lines = [
        f"# Flags of recipes/{recipe}.py",
        "",
        _MARK,
        "",
        summary,
        "",
        f"`python recipes/{recipe}.py --help` lists the flags that most runs need, and `--help_all` "
        "all of them. Flags marked with \\* are in `--help_all` only. In a YAML file for `--config`, "
        "a flag is a key without its dashes, and `--no_NAME` is `NAME: false`.",
        "",
    ]
    parser = recipe_parser(configs_of(module["DEFAULTS"]))
    for title, flags in parser.sections.items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        lines += _table(["Flag", "Meaning"], map(_flag_row, flags))
    return "\n".join(lines)


def _flag_row(flag: Flag) -> list[str]:
    value = "" if flag.choices or flag.kind is bool else flag.metavar
    if value and flag.takes_list:
        value += " ..."
    name = f"`--{flag.name} {value}`" if value else f"`--{flag.name}`"
    if flag.metadata["hidden"]:
        name += " \\*"

    meaning = _with_code(flag.metadata["help"])
    if flag.choices:
        meaning += f" ({_code(flag.choices)})"
    if flag.metadata["alias"]:
        meaning += f"; also called `--{flag.metadata['alias']}`"
    default = text_of(flag.default)
    if default:
        meaning += f" (default: `{default}`)"
    return [name, meaning]


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
    rows = []
    for action in command._actions:
        if action.dest not in ("help", "json") and action.help != argparse.SUPPRESS:
            rows.append(_argument_row(action))
    return lines + _table(["Argument", "Meaning"], rows)


def _argument_row(action: argparse.Action) -> list[str]:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    choices = list(map(str, action.choices or []))
    if action.option_strings and action.nargs != 0 and not choices:
        names += f" {action.metavar or action.dest.upper()}"

    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    meaning = _with_code(text)
    if choices:
        meaning += f" ({_code(choices)})"
    return [f"`{names}`", meaning]


# --- Markdown


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [_row(header), _row(["---"] * len(header))]
    lines += [_row([_escaped(cell) for cell in row]) for row in rows]
    return [*lines, ""]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").replace("<", "\\<").split())


def _with_code(text: str) -> str:
    """Return a text with its flags as code."""
    return re.sub(r"--\w+", lambda match: f"`{match[0]}`", text)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    main()
