"""Where a run's numbers come from, and what all ranks must agree on.

The *fingerprint* of a run is everything that determines its numbers, as a JSON object. A run is
resumed only by a command that has the same fingerprint.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from llmtrain._version import __version__
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.parallel.team import Team
from llmtrain.types import JsonObject

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
# Flags that may differ between machines: paths, and what only rank 0 does.
_LOCAL_FLAGS = {
    "dataset",
    "tokenizer",
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "report_to",
}

_DETAILS = "details"  # a key of a description that is not compared
# Parts of a fingerprint that are hashes, and the keys of run.json that describe what was hashed.
_DESCRIBED_BY = {
    "data": ("dataset", "documents", "train_tokens", "eval_tokens"),
    "tokenizer": ("tokenizer", "vocabulary"),
}


def digest(content: JsonObject) -> str:
    """Return the sha256 of a JSON object, in hexadecimal digits, whatever the order of its keys."""
    return hashlib.sha256(json_text(content, sort_keys=True).encode()).hexdigest()


def version_of(package: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that the numbers depend on."""
    return {
        "python": platform.python_version(),
        "llmtrain": version_of("llmtrain") or __version__,
        **{package: version_of(package) or "absent" for package in _PACKAGES},
    }


def code_digest() -> str:
    """Return one sha256 over all the code that :func:`code_digests` covers."""
    return digest(code_digests())


def code_digests() -> dict[str, str]:
    """Return the sha256 of the code that runs.

    Installed packages are left out: :func:`versions` has those that matter.

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


def difference(before: object, now: object) -> str:
    """Describe the difference between two values, for an error message.

    For two dictionaries, only the keys that differ are listed.

    Args:
        before: the value of another run or rank.
        now: the value of this one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"{before} there, {now} here"

    keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)} there, {now.get(key)} here" for key in sorted(keys))


def named_difference(
    key: str, before: object, now: object, before_record: JsonObject, now_record: JsonObject
) -> str:
    """Describe the difference between two values of a fingerprint, with names instead of hashes.

    Args:
        key: the key of the fingerprint, or ``code``.
        before: the value of another run or rank.
        now: the value of this one.
        before_record: ``run.json`` of the other one, or as much of it as describes its data.
        now_record: the same of this one.
    """
    if key == "code" and isinstance(before, dict) and isinstance(now, dict):
        files = [name for name in sorted(now) if before.get(name) != now[name]]
        return f"{', '.join(files)} has another content there"
    if key == "initial_weights":
        return _difference_of_start(before, now, before_record, now_record)
    if key not in _DESCRIBED_BY or not before_record or not now_record:
        return difference(before, now)

    name_key, *count_keys = _DESCRIBED_BY[key]
    names = [record.get(name_key) for record in (before_record, now_record)]
    before_counts = {name: before_record.get(name) for name in count_keys}
    now_counts = {name: now_record.get(name) for name in count_keys}
    counts = difference(before_counts, now_counts).replace("_", " ")
    if names[0] != names[1]:
        return ", ".join(part for part in (f"{names[0]} there, {names[1]} here", counts) if part)
    return f"{names[0]} has another content ({counts or 'of the same size'})"


def _difference_of_start(
    before: object, now: object, before_record: JsonObject, now_record: JsonObject
) -> str:
    """Describe the difference between the models that two runs start from.

    Args:
        before: the part ``initial_weights`` of the fingerprint of another run or rank.
        now: the same of this one.
        before_record: ``run.json`` of the other one.
        now_record: the same of this one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return difference(before, now)
    names = []
    for record in (before_record, now_record):
        settings = record.get("settings") or {}
        names.append((settings.get("model_name_or_path") or {}).get("value"))

    parts = []
    rest = dict(before), dict(now)
    if before.get("weights") != now.get("weights") and any(names):
        for values in rest:
            values.pop("weights", None)
        if names[0] == names[1]:
            parts.append(f"{names[0]} has other weights now")
        else:
            parts.append(f"model {names[0]} there, {names[1]} here")
    parts.append(difference(*rest))
    return ", ".join(part for part in parts if part)


def run_description(
    fingerprint: JsonObject,
    settings: dict[str, JsonObject],
    precision: str,
    details: JsonObject | None = None,
) -> JsonObject:
    """Describe what this rank is about to train, and with which code.

    Args:
        fingerprint: the fingerprint of the run.
        settings: every flag with its value and origin (:func:`llmtrain.config.resolved`).
        precision: the precision as Accelerate names it, such as ``bf16``.
        details: the names and sizes of the data, for error messages. They are not compared.
    """
    flags = {
        name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS
    }
    return {
        "flags": flags,
        **fingerprint,
        "precision": precision,
        "versions": versions(),
        "code": code_digests(),
        _DETAILS: details or {},
    }


def check_ranks_agree(team: Team, description: JsonObject) -> None:
    """Check that all ranks are about to train the same.

    They may not, because each machine may have its own command, data, packages and code.

    Args:
        team: all ranks.
        description: what :func:`run_description` returns on this rank.

    Raises:
        UserError: on all ranks, if a rank is about to train something else than rank 0.
    """
    main_description, *descriptions = team.on_all(lambda: description)
    for rank, other_description in enumerate(descriptions, start=1):
        for key in main_description:
            if key == _DETAILS:
                continue
            expected, actual = _comparable(key, main_description, other_description)
            if expected != actual:
                reason = named_difference(
                    key,
                    actual,
                    expected,
                    before_record=other_description.get(_DETAILS, {}),
                    now_record=main_description[_DETAILS],
                )
                raise UserError(f"rank {rank} differs from rank 0 in {key}: {reason}.")


def _comparable(key: str, main: JsonObject, other: JsonObject) -> tuple[Any, Any]:
    """Return the values of a key that must be the same on rank 0 and on another rank."""
    expected = main[key]
    actual: Any = other.get(key)
    if key == "code":
        # A rank may import a helper module that the other ranks do not need.
        shared = expected.keys() & actual.keys()
        expected = {name: expected[name] for name in shared}
        actual = {name: actual[name] for name in shared}
    return expected, actual


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
