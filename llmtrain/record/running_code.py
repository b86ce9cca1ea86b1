"""The code that this process runs: its hashes and its git commit."""

import ast
import contextlib
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from llmtrain.files import digest

_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages


def code_digest() -> str:
    """Return one sha256 over all the code that :func:`code_digests` covers."""
    return digest(code_digests())


def code_digests() -> dict[str, str]:
    """Return the sha256 of the code that runs.

    Installed packages are left out: :func:`llmtrain.versions.versions` has those that matter.

    Returns:
        A sha256 for ``package``, for ``script``, and for each helper module by its file name.
        Helper modules are in the script's folder or below it. They are those that the process has
        imported, and those that an ``import`` statement of the script or a helper names, because a
        function may import one later.
    """
    package = Path(__file__).resolve().parents[1]
    script = Path(sys.argv[0]).resolve()
    helpers: dict[str, Path] = {}
    if script.is_file():
        helpers = _modules_below(script, leave_out=package)
        helpers.pop(script.name, None)

    digests = {
        "package": _sha256_of(sorted(package.rglob("*.py"))),
        "script": _sha256_of([script]),
    }
    for name, path in sorted(helpers.items()):
        digests[name] = _sha256_of([path])
    return digests


def _modules_below(script: Path, leave_out: Path) -> dict[str, Path]:
    """Return the files of the modules in the script's folder, by their names relative to it."""
    folder = script.parent
    libraries = Path(sysconfig.get_path("stdlib"))
    names = []
    for module in list(sys.modules.values()):
        # Reading `module.__file__` itself could start a lazy import.
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str):
            names.append(name)

    files = {}
    pending = [Path(os.path.abspath(name)) for name in names]  # noqa: PTH100 - resolve() is slow
    pending += _imports_of(script, folder)
    while pending:
        path = pending.pop()
        is_installed = path.is_relative_to(libraries) or bool(_INSTALLED & {*path.parts})
        is_helper = path.is_relative_to(folder) and not path.is_relative_to(leave_out)
        if is_installed or not is_helper:
            continue
        name = str(path.relative_to(folder))
        if name not in files:
            files[name] = path
            pending += _imports_of(path, folder)
    return files


def _imports_of(path: Path, folder: Path) -> list[Path]:
    """Return the files below a folder that the import statements of a Python file name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []

    modules = []  # folders and names of modules, without a suffix
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [folder.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else folder
            base = base.joinpath(*(node.module or "").split("."))
            modules += [base, *(base / alias.name for alias in node.names)]

    files = [module.with_name(f"{module.name}.py") for module in modules]
    for module in modules:
        packages = [module, *module.parents]
        files += [package / "__init__.py" for package in packages if folder in package.parents]
    return [file for file in files if file.is_file()]


def _sha256_of(paths: list[Path]) -> str:
    """Return one sha256 over the contents of files. Files that cannot be read are left out."""
    total = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            total.update(path.read_bytes())
    return total.hexdigest()


def git_commit() -> str | None:
    """Return the git commit of the script, or ``None`` if it is in no repository.

    The commit ends in ``-dirty`` if a tracked file has changed since then, and in ``-unknown`` if
    git does not say.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return f"{commit}-unknown"
    return f"{commit}-dirty" if changes else commit


def _git(*arguments: str) -> str | None:
    """Run git in the script's folder.

    Returns:
        What git prints, or ``None`` if it fails or takes more than five seconds.
    """
    folder = str(Path(sys.argv[0]).resolve().parent)
    command = ["git", "-C", folder, "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
