"""Count the package, and compare it with tools/size.toml, which has a limit for each number.

A number above its limit is an error. Whoever raises a limit says in the same commit what users get
for it. Private names, subjects of modules and lines of code can be moved elsewhere; so names that
are used once are counted with and without an underscore, modules also by their length, and
packaged files in other languages by their lines.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
DATA = ("yaml", "json", "jinja", "html", "txt", "pyi")


def code_lines(source: str) -> int:
    """Count the lines of a module that are not blank, a comment or a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in lines
    )


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a NamedTuple, a TypedDict or a dataclass."""
    described = " ".join(ast.unparse(part) for part in [*node.bases, *node.decorator_list])
    return re.search("NamedTuple|TypedDict|dataclass", described) is not None


def measure(root: Path) -> dict[str, int]:
    """Return the numbers of a tree by their names in tools/size.toml."""
    sources = [path.read_text() for path in sorted((root / "llmtrain").rglob("*.py"))]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))

    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    documented = set(re.findall(r"\w+", " ".join(page.read_text() for page in pages)))
    names = [node.name for node in functions if not node.name.startswith("__")]
    used_once = [name for name in names if uses[name] == 1]

    data = [path for folder in ("llmtrain", "recipes") for path in (root / folder).rglob("*.*")]
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    return {
        "lines": sum(map(code_lines, sources)),
        "modules": sum(code_lines(source) > 0 for source in sources),
        "modules_above_400_lines": sum(len(source.splitlines()) > 400 for source in sources),
        "lines_beyond_150_of_a_module": sum(max(0, code_lines(text) - 150) for text in sources),
        "functions": len(functions),
        "functions_above_60_lines": sum((f.end_lineno or 0) - f.lineno >= 60 for f in functions),
        "private_helpers_used_once": sum(name.startswith("_") for name in used_once),
        "functions_used_once": sum(name not in documented for name in used_once),
        "records": sum(isinstance(node, ast.ClassDef) and is_record(node) for node in nodes),
        "lines_of_tests": sum(map(code_lines, tests)),
        "lines_of_data": sum(
            len(path.read_text().splitlines()) for path in data if path.suffix[1:] in DATA
        ),
    }


if __name__ == "__main__":
    limits = tomllib.loads((ROOT / "tools" / "size.toml").read_text())
    numbers = measure(ROOT)
    for name, number in numbers.items():
        excess = f"  too many: remove {number - limits[name]}" if number > limits[name] else ""
        print(f"{name:30} {number:7,} of {limits[name]:7,}{excess}")
    sys.exit(any(number > limits[name] for name, number in numbers.items()))
