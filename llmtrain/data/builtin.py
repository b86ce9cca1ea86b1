"""Text that every machine already has: the documentation of the running Python.

``python-docs`` is the language reference (``pydoc_data.topics``) and the docstrings of the standard library, a document
per module, written as ``help()`` would: the signature, then the docstring. ``python-functions`` is the library's
functions with a docstring, one document each; ``python-preferences`` has a wrong docstring beside each right one.
Nothing is shipped and nothing is downloaded.
"""

import ast
import functools
import hashlib
import inspect
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

_SKIPPED_FOLDERS = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("idlelib", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"),
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_docs() -> Iterator[dict[str, str]]:
    """Yield about 2.5 MB in 600 documents."""
    from pydoc_data.topics import topics  # half a megabyte, and only this corpus needs it

    yield from ({"text": text.strip() + "\n"} for _, text in sorted(topics.items()))
    yield from ({"text": text} for path in _files() if (text := _documentation(path)))


def python_functions() -> Iterator[dict[str, str]]:
    """Yield about 6,000 functions, each with its docstring: as one text, and as a question and its answer."""
    for code, docstring in function_pairs():
        yield {"text": f"{code}\n\n{docstring}\n", "prompt": code, "completion": docstring}


def function_pairs() -> Iterator[tuple[str, str]]:
    """Return the source of each function without its docstring, and the docstring, in the library's order."""
    return (pair for path in _files() for pair in _pairs(path))


def python_preferences() -> Iterator[dict[str, str]]:
    """Yield the functions as questions with two answers: the docstring, and one that is wrong but looks like one.

    That is the docstring of the function before, the beginning of its own, or its own with the words shuffled.
    """
    before = ""
    for number, (code, docstring) in enumerate(function_pairs()):
        words = docstring.split()
        shuffled = random.Random(number).sample(words, len(words))
        wrong = [before, " ".join(words[: len(words) // 2]), " ".join(shuffled)][number % 3]
        before = docstring
        if wrong not in ("", docstring):
            yield {"prompt": code, "chosen": docstring, "rejected": wrong}


CORPORA: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    "builtin:python-docs": python_docs,
    "builtin:python-functions": python_functions,
    "builtin:python-preferences": python_preferences,
}


def fingerprint(name: str) -> str:
    """Return a digest of this Python's version and of the files that a corpus is read from, without parsing them."""
    digest = hashlib.sha256(f"{name.removeprefix('builtin:')} {sys.version_info[:3]}".encode())
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


def _parse(path: Path) -> tuple[str, ast.Module]:
    """Return a file's source and its tree: nothing of templates and of files in old encodings."""
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return "", ast.Module([], [])


@functools.cache
def _documentation(path: Path) -> str:
    """Return a module's name and docstrings; nothing where it has none."""
    tree = _parse(path)[1]
    module = ".".join(
        name for name in path.relative_to(_root()).with_suffix("").parts if name != "__init__"
    )
    texts = [_docstring(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | _Function) and (docstring := _docstring(node)):
            if isinstance(node, ast.ClassDef):
                bases = ", ".join(map(ast.unparse, node.bases))
                signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
            else:
                signature = f"def {node.name}({ast.unparse(node.args)})"
            indented = "".join(f"    {line}\n" if line else "\n" for line in docstring.splitlines())
            texts.append(f"{signature}\n{indented}")
    return "\n".join(filter(None, [f"{module}\n", *texts])) if any(texts) else ""


@functools.cache
def _pairs(path: Path) -> list[tuple[str, str]]:
    source, tree = _parse(path)
    lines, found = source.splitlines(), []
    for node in ast.walk(tree):
        if isinstance(node, _Function) and (docstring := _docstring(node)) and len(node.body) > 1:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            quoted = node.body[0]
            code = lines[first - 1 : quoted.lineno - 1] + lines[quoted.end_lineno : node.end_lineno]
            found.append((inspect.cleandoc("\n".join(["", *code])), docstring))
    return found


def _docstring(node: ast.Module | ast.ClassDef | _Function) -> str:
    return (ast.get_docstring(node) or "").strip()
