"""Write the reference pages that follow from the code: flags, commands and the Python API.

    python docs/generate_reference.py

The pages are kept in the repository, so that they can be read without Sphinx. A test fails if one
of them is not what this program writes.
"""

import argparse
import ast
import inspect
import re
import runpy
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import llmtrain as lt
from llmtrain.cli import GROUPS, build_parser
from llmtrain.config.command_line import recipe_parser
from llmtrain.config.flags import configs_of
from llmtrain.config.parser import Flag, text_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
RECIPES = ("gpt", "finetune", "distill", "preference")
_MARK = "<!-- python docs/generate_reference.py writes this page -->"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"flags.md": _flags_page(), "commands.md": _commands_page(), "api.md": _api_page()}


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

    # The last recipe has most sections.
    sections: dict[str, dict[str, FlagByRecipe]] = {}
    for recipe in reversed(RECIPES):
        for title in sections_by_recipe[recipe]:
            sections.setdefault(title, {})
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


# --- the Python API

# The methods and properties on the page, by class: those that a recipe calls or defines.
_METHODS = {
    "Config": "set|set_default|is_set|check_given",
    "Tokenized": "of|vocabulary|is_packed|positions|eval_sources",
    **dict.fromkeys(["Schedule", "Model", "Objective", "Metric", "Callback", "Part"], r"[a-z]\w+"),
}


def _api_page() -> str:
    """Return the page with the text below each name; names, order and sections stay as they are."""
    # A text, and then a heading and a text by turns.
    parts = re.split(r"^(#{2,3} .*\n)", (FOLDER / "api.md").read_text(), flags=re.MULTILINE)
    names = []
    for number in range(1, len(parts), 2):
        if parts[number].startswith("### lt."):
            name = parts[number].removeprefix("### lt.").strip()
            parts[number + 1] = "\n" + "\n".join(_api_lines(name)) + "\n"
            names.append(name)

    assert {*names} == {*dir(lt)} - {"__version__"}, "api.md has a heading for each public name"
    return "".join(parts).rstrip("\n") + "\n"


def _api_lines(name: str) -> list[str]:
    """Return the signature of a public name, its docstring and its methods as Markdown."""
    subject = getattr(lt, name)
    [node] = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    text, items = _docstring(inspect.getdoc(subject) or "")
    if name not in _METHODS:
        text = text.partition("\n\n")[0]
    methods = re.compile(_METHODS.get(name, ""))
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and methods.fullmatch(member.name):
            items += _method_items(member)

    # The fields of a config are flags, which have a page of their own.
    is_config = inspect.isclass(subject) and issubclass(subject, lt.Config)
    signature = [] if is_config else _signature(name, node)
    return [*signature, text, "", *items, ""] if items else [*signature, text, ""]


def _signature(name: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the block with a call of a name; nothing for a class that a recipe derives from."""
    arguments = None
    result = ""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    else:
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                arguments = member.args
                arguments.args = arguments.args[1:]

    parameters = []
    if arguments is not None:
        required = len(arguments.args) - len(arguments.defaults)
        names = [*arguments.args, *arguments.kwonlyargs]
        defaults = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
        for parameter, default in zip(names, defaults, strict=True):
            end = f" = {ast.unparse(default)}" if default else ""
            parameters.append(ast.unparse(parameter) + end)
        if arguments.kwonlyargs:
            parameters.insert(len(arguments.args), "*")
    elif re.search(
        "NamedTuple|dataclass", " ".join(map(ast.unparse, [*node.bases, *node.decorator_list]))
    ):
        fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
        parameters = [ast.unparse(field) for field in fields]

    line = f"lt.{name}({', '.join(parameters)}){result}"
    if len(line) > 90:
        line = "\n".join([f"lt.{name}(", *(f"    {text}," for text in parameters), f"){result}"])
    line = re.sub(r": '([^']+)'", r": \1", line)
    line = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", line)
    return ["```py", line, "```", ""] if parameters else []


def _method_items(method: ast.FunctionDef) -> list[str]:
    """Return the item of a method or property: its first paragraph, and its arguments."""
    text, items = _docstring(ast.get_docstring(method) or "")
    arguments = method.args
    names = [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]
    if arguments.kwarg is not None:
        names.append(f"**{arguments.kwarg.arg}")
    is_property = any(ast.unparse(decorator) == "property" for decorator in method.decorator_list)
    call = "" if is_property else f"({', '.join(names[1:])})"
    first_paragraph = text.partition("\n\n")[0]
    return [_item(f"`{method.name}{call}`", first_paragraph), *(f"  {item}" for item in items)]


def _docstring(docstring: str) -> tuple[str, list[str]]:
    """Return the text of a docstring in Google style, and the items of its sections, as Markdown."""
    markdown = re.sub(r":\w+:`~?(?:llmtrain\.)?([^`]+)`", r"`\1`", docstring).replace("``", "`")
    text, *sections = re.split(
        r"^(Args|Attributes|Returns|Raises):\n", markdown, flags=re.MULTILINE
    )
    items = []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title == "Returns":
            items.append(_item("Returns", body))
            continue
        for name, meaning in re.findall(
            r"^    \**(\w+): (.*(?:\n(?:     .*|(?=\n)))*)", body, re.MULTILINE
        ):
            first, *choices = re.split(r"^ +- ", meaning, flags=re.MULTILINE)
            items.append(_item(f"Raises `{name}`" if title == "Raises" else f"`{name}`", first))
            items += [f"  - {' '.join(choice.split())}" for choice in choices]
    return text.strip(), items


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
