"""Real text that every machine already has: the documentation of the running Python.

``python-docs`` is the language reference (``pydoc_data.topics``) and the docstrings of the standard library, a document
per module, written as ``help()`` would: the signature, then the docstring. ``python-functions`` is the library's
functions with a docstring, one document each. Nothing is shipped and nothing is downloaded.
"""

import ast
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_SKIPPED_FOLDERS = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("idlelib", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"),
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


_T = TypeVar("_T")


def _remembered(generator: Callable[[], Iterator[_T]]) -> Callable[[], Iterator[_T]]:
    """The same generator; what it yields is kept once somebody has read all of it."""
    kept: list[_T] = []

    @functools.wraps(generator)
    def read() -> Iterator[_T]:
        if kept:
            yield from kept
            return
        made = []
        for item in generator():
            made.append(item)
            yield item
        kept[:] = made

    return read


@_remembered
def python_docs() -> Iterator[dict[str, str]]:
    """About 2.5 MB in 600 documents."""
    from pydoc_data.topics import topics  # half a megabyte, and only this corpus needs it

    for _, text in sorted(topics.items()):
        yield {"text": text.strip() + "\n"}
    for module, _, tree in _modules():
        parts = [f"{module}\n", _docstring(tree)]
        for node in ast.walk(tree):
            if isinstance(node, _Documented) and (docstring := _docstring(node)):
                parts.append(f"{_signature(node)}\n{_indented(docstring)}")
        if len(parts) > 2 or parts[1]:
            yield {"text": "\n".join(part for part in parts if part)}


@_remembered
def python_functions() -> Iterator[dict[str, str]]:
    """About 6,000 functions, each with its docstring: as one text, and as a question and its answer."""
    for code, docstring in function_pairs():
        yield {"text": f"{code}\n\n{docstring}\n", "prompt": code, "completion": docstring}


def function_pairs() -> Iterator[tuple[str, str]]:
    """(source of a function without its docstring, the docstring), in the library's order."""
    for _, source, tree in _modules():
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, _Function) or not (docstring := _docstring(node)) or len(node.body) < 2:
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            quoted = node.body[0]
            kept = lines[first - 1 : quoted.lineno - 1] + lines[quoted.end_lineno : node.end_lineno]
            yield inspect.cleandoc("\n".join(["", *kept])), docstring


CORPORA: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    "python-docs": python_docs,
    "python-functions": python_functions,
}


def fingerprint(name: str) -> str:
    """Digest of this Python's version and of the files that the corpus is read from, without parsing them."""
    digest = hashlib.sha256(f"{name} {sys.version_info[:3]}".encode())
    for path in _files():
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _files() -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(_root()):
        folders[:] = set(folders) - _SKIPPED_FOLDERS  # site-packages may hold very many files
        found += (Path(folder, name) for name in files if name.endswith(".py"))
    return sorted(found)


def _modules() -> Iterator[tuple[str, str, ast.Module]]:
    for path in _files():
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # templates and files in old encodings
            continue
        parts = path.relative_to(_root()).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), source, tree


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
    return (ast.get_docstring(node) or "").strip()


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    assert isinstance(node, _Function)
    return f"def {node.name}({ast.unparse(node.args)})"


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
