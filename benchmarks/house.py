"""The house in figures: lines, files, names, flags, words, docstrings, doors and circles of one tree or of two.

python -m benchmarks.house [TREE [OTHER]] [--full]

A tree is a checkout; without one it is this file's own. Nothing of it is imported, but in processes of its own for the
help of its recipes.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOMS = {"data", "models", "parallel", "observe", "record"}  # which do not know each other
CALLERS = {"training", "commands"}  # which no room knows
OUTERMOST = {"report", "plan", "doctor", "lessons", "commands"}  # which nobody below knows
BELOW = ROOMS | {"training", "launch", "recipes"}
GROUND_FLOOR = {"llmtrain.parallel.mesh", "llmtrain.parallel.collectives"}  # which all may import
REFUSED = re.compile(r"(What|Those|That|Of|Whether|Where|Which|The same|So)\b")
SHOWN = 5
Section = dict[str, str]  # by row: a cell of the tree's column


@dataclass(frozen=True)
class Module:
    """A source file and its syntax tree."""

    name: str  # llmtrain.data.rows
    path: str  # from the tree's root
    source: str
    syntax: ast.Module

    @property
    def room(self) -> str:
        """The folder inside the package, or the module's own name beside the folders."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @property
    def lines(self) -> int:
        """The lines of code: no blank ones, comments or docstrings."""
        left_out = {
            line for text in _docstrings(self.syntax) for line in range(text.first, text.last + 1)
        }
        lines = enumerate(map(str.strip, self.source.splitlines()), start=1)
        return sum(
            1 for number, line in lines if line and line[0] != "#" and number not in left_out
        )


class Tree:
    """A checkout, as far as it is Python."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {module.name: module for module in self._read("llmtrain")}
        self.recipes = [*self._read("recipes")]
        self.homes = self._homes()

    def _read(self, folder: str) -> Iterator[Module]:
        for path in sorted((self.root / folder).rglob("*.py")):
            where, source = path.relative_to(self.root), path.read_text(encoding="utf-8")
            parts = where.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            prefix = (
                "" if folder == "llmtrain" else "llmtrain."
            )  # the name under which recipes are installed
            yield Module(prefix + name, str(where), source, ast.parse(source))

    def _homes(self) -> dict[str, str]:
        """Return the public names and the modules that have them, as ``llmtrain/__init__.py`` says it."""
        homes: dict[str, str] = {}
        for node in ast.walk(self.modules["llmtrain"].syntax):
            if isinstance(node, ast.ImportFrom):
                homes |= {alias.name: node.module or "" for alias in node.names if alias.asname}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                named = {
                    constant.value
                    for constant in ast.walk(node)
                    if isinstance(constant, ast.Constant)
                }
                homes |= {str(name): "llmtrain" for name in named if name not in homes}
        return homes

    def imports(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Return the modules of the package that these statements import, also by one of its public names."""
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for name in (alias.name for alias in node.names):
                    home = (
                        self.homes.get(name, "llmtrain")
                        if node.module == "llmtrain"
                        else node.module
                    )
                    inner = f"{node.module}.{name}"
                    found.add(inner if inner in self.modules else home)
        return {name for name in found if name == "llmtrain" or name.startswith("llmtrain.")}

    def strangers(self) -> list[str]:
        """Return the imports that go against the doors, inside functions too."""
        found = []
        for module in [*self.modules.values(), *self.recipes]:
            refused = OUTERMOST if module.room in BELOW else set()
            if module.room in ROOMS:
                refused = refused | ROOMS | CALLERS
            for name in sorted(self.imports(ast.walk(module.syntax)) - GROUND_FLOOR):
                room = name.split(".")[1] if "." in name else ""
                if room in refused - {module.room}:
                    found.append(f"{_short(module.name)} -> {_short(name)}")
        return found

    def circles(self) -> list[str]:
        """Return a shortest circle of each set of modules that import each other while they are loaded."""
        graph = {
            name: self.imports(_at_load(module.syntax.body)) & self.modules.keys()
            for name, module in self.modules.items()
        }
        found, seen = [], set[str]()
        for name in graph:
            circle = _way_back(graph, name)
            if circle and not seen.intersection(circle):
                found.append(" -> ".join(map(_short, [*circle, name])))
            seen.update(circle)
        return found

    def refused_docstrings(self) -> list[tuple[str, str]]:
        """Return the refused openings, and where each stands."""
        found = []
        for module in self.modules.values():
            for docstring in _docstrings(module.syntax):
                if opening := REFUSED.match(docstring.text):
                    found.append((opening[0], f"{module.path}:{docstring.first}"))
        return found

    def flags(self, recipe: Module, asked: str) -> str:
        """Return how many flags the help of a recipe shows; a dash where it has no such help."""
        environment = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, recipe.path, asked]
        ended = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        lines = ended.stdout.splitlines()
        return "-" if ended.returncode else str(sum(line.startswith("  --") for line in lines))


class Docstring(NamedTuple):
    """A docstring, and the lines that it fills."""

    text: str
    first: int
    last: int


def _docstrings(syntax: ast.Module) -> Iterator[Docstring]:
    for node in ast.walk(syntax):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield Docstring(text, node.body[0].lineno, node.body[0].end_lineno or 0)


def _at_load(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield what is executed when a module is loaded: nothing inside functions, nothing for type checkers alone."""
    for node in statements:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _at_load(ast.iter_child_nodes(node))


def _way_back(graph: dict[str, set[str]], start: str) -> list[str]:
    """Return the shortest way from a node to itself, the node first; nothing where there is none."""
    before: dict[str, str] = {}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for other in sorted(graph[node]):
            if other == start:
                way = [node]
                while way[0] != start:
                    way.insert(0, before[way[0]])
                return way
            if other not in before:
                before[other] = node
                waiting.append(other)
    return []


def _short(name: str) -> str:
    return name.removeprefix("llmtrain.")


def _counted(found: list[str], shown: int) -> Section:
    """Return how many there are, and the first of them."""
    return {
        "": str(len(found)),
        **{f"  {number}": one for number, one in enumerate(found[:shown], start=1)},
    }


def describe(tree: Tree, shown: int) -> dict[str, Section]:
    """Return the figures of a tree by section and row."""
    modules = [*tree.modules.values()]
    rooms: Counter[str] = Counter()
    for module in modules:
        rooms[
            module.room if (tree.root / "llmtrain" / module.room).is_dir() else "beside the rooms"
        ] += module.lines
    recipes = [recipe for recipe in tree.recipes if not recipe.path.endswith("__init__.py")]
    longest = sorted(modules, key=lambda module: -module.lines)[:shown]
    openings = tree.refused_docstrings()
    by_opening = {
        f"  {opening}": str(count)
        for opening, count in Counter(one for one, _ in openings).most_common()
    }
    places = [place for _, place in openings] if shown > SHOWN else []
    return {
        "lines of code": {
            "": str(rooms.total()),
            **{f"  {room}": str(count) for room, count in sorted(rooms.items())},
            **{f"  {recipe.path}": str(recipe.lines) for recipe in recipes},
        },
        "longest files": {
            f"  {i}": f"{module.lines} {module.path}" for i, module in enumerate(longest, start=1)
        },
        "the word Any": {
            "": str(sum(len(re.findall(r"\bAny\b", module.source)) for module in modules))
        },
        "public names": {"": str(len(tree.homes))},
        "flags": {
            f"  {Path(recipe.path).stem} {asked}": tree.flags(recipe, asked)
            for recipe in recipes
            for asked in ("--help", "--help_all")
        },
        "words of README.md": {
            "": str(len((tree.root / "README.md").read_text(encoding="utf-8").split()))
        },
        "refused openings of docstrings": {
            **_counted(places, shown),
            "": str(len(openings)),
            **by_opening,
        },
        "imports against the doors": _counted(tree.strangers(), shown),
        "circles of imports": _counted(tree.circles(), shown),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "trees", nargs="*", type=Path, metavar="TREE", help="a checkout, or two to compare"
    )
    parser.add_argument(
        "--full", action="store_true", help=f"list everything that is found, not the first {SHOWN}"
    )
    arguments = parser.parse_args()
    roots = [root.resolve() for root in arguments.trees or [Path(__file__).parent.parent]]
    for root in roots:
        if not (root / "llmtrain" / "__init__.py").exists():
            parser.error(f"{root} is no checkout of this package: it has no llmtrain/__init__.py")
    shown = sys.maxsize if arguments.full else SHOWN
    described = [describe(Tree(root), shown) for root in roots]
    rows = [("", [str(root) for root in roots])]
    for title in described[0]:
        sections = [one[title] for one in described]
        for name in dict.fromkeys(name for section in sections for name in ["", *section]):
            rows.append((name or title, [section.get(name, "") for section in sections]))
    widths = [
        max(len(cell) for cell in column)
        for column in zip(*(cells for _, cells in rows), strict=True)
    ]
    first = max(len(name) for name, _ in rows)
    for name, cells in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip_longest(cells, widths))
        print(f"{name:<{first}}  {line}".rstrip())


if __name__ == "__main__":
    main()
