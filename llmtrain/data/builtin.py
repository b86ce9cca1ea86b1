"""Text that every machine already has: the documentation of the running Python.

- ``python-docs``: the language reference (``pydoc_data.topics``) and the docstrings of the standard
  library, a document for each module. As in ``help()``, the signature comes before the docstring.
- ``python-functions``: the library's functions that have a docstring, a document for each.
- ``python-preferences``: the same functions, each with its docstring and a wrong one.

Nothing is shipped with this package and nothing is downloaded.
"""

import ast
import functools
import inspect
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "ensurepip",
}
_ROOT = Path(sysconfig.get_paths()["stdlib"])
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_docs() -> Iterator[dict[str, str]]:
    """Yield about 2.5 MB of text in 600 documents."""
    from pydoc_data.topics import topics  # half a megabyte, and only this corpus needs it

    for _, text in sorted(topics.items()):
        yield {"text": text.strip() + "\n"}
    for path in _files():
        text = _documentation(path)
        if text:
            yield {"text": text}


def python_functions() -> Iterator[dict[str, str]]:
    """Yield about 6,000 functions with their docstrings.

    Each record holds both as one text, and as a prompt and its completion.
    """
    for code, docstring in function_pairs():
        yield {"text": f"{code}\n\n{docstring}\n", "prompt": code, "completion": docstring}


def python_preferences() -> Iterator[dict[str, str]]:
    """Yield the functions as prompts, each with its docstring and a wrong one that looks right.

    In turn, the wrong one is the docstring of the function before, the first half of the right
    docstring, or the right docstring with its words shuffled.
    """
    docstring_before = ""
    for number, (code, docstring) in enumerate(function_pairs()):
        words = docstring.split()
        if number % 3 == 0:
            wrong = docstring_before
        elif number % 3 == 1:
            wrong = " ".join(words[: len(words) // 2])
        else:
            wrong = " ".join(random.Random(number).sample(words, len(words)))
        docstring_before = docstring

        if wrong not in ("", docstring):
            yield {"prompt": code, "chosen": docstring, "rejected": wrong}


CORPORA: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    "builtin:python-docs": python_docs,
    "builtin:python-functions": python_functions,
    "builtin:python-preferences": python_preferences,
}


def _files() -> list[Path]:
    """Return the source files of the standard library, sorted."""
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(_ROOT):
        # os.walk enters only these: site-packages may hold very many files.
        subfolders[:] = set(subfolders) - _SKIPPED_FOLDERS
        paths += (Path(folder, name) for name in files if name.endswith(".py"))
    return sorted(paths)


def _parse(path: Path) -> tuple[str, ast.Module]:
    """Return a file's source and its syntax tree.

    Both are empty if the file is a template, which is not valid Python, or in an old encoding.
    """
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return "", ast.Module([], [])


@functools.cache
def _documentation(path: Path) -> str:
    """Return a module's name and docstrings, or an empty text if it has no docstring."""
    _, tree = _parse(path)
    texts = [_docstring(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | _Function):
            docstring = _docstring(node)
            if docstring:
                lines = [f"    {line}\n" if line else "\n" for line in docstring.splitlines()]
                texts.append("".join([f"{_signature(node)}\n", *lines]))
    if not any(texts):
        return ""

    parts = path.relative_to(_ROOT).with_suffix("").parts
    module = ".".join(name for name in parts if name != "__init__")
    return "\n".join([f"{module}\n", *filter(None, texts)])


def _signature(node: ast.ClassDef | _Function) -> str:
    """Return the first line of a class or function, without decorators and return annotation."""
    if not isinstance(node, ast.ClassDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def function_pairs() -> Iterator[tuple[str, str]]:
    """Yield the source of each function without its docstring, and the docstring."""
    for path in _files():
        yield from _pairs_in(path)


@functools.cache
def _pairs_in(path: Path) -> list[tuple[str, str]]:
    """Return the functions of a file, each without its docstring, and the docstring."""
    pairs = []
    source, tree = _parse(path)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, _Function) or len(node.body) < 2 or not _docstring(node):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        quoted = node.body[0]  # the statement that is the docstring
        code = lines[first - 1 : quoted.lineno - 1] + lines[quoted.end_lineno : node.end_lineno]
        # An empty first line, because cleandoc() ignores the first line's indentation.
        pairs.append((inspect.cleandoc("\n".join(["", *code])), _docstring(node)))
    return pairs


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
    """Return the docstring of a node, or an empty text if it has none."""
    return (ast.get_docstring(node) or "").strip()
