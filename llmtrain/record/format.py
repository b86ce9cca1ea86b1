"""The version of a run's files on disk.

Files of a newer version are refused. A run of an earlier version is read, and not resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.files import read_object

if TYPE_CHECKING:
    from llmtrain.json_types import JsonObject

# The version of run.json, state.json and MANIFEST.json. Raise it when a reader must change.
FORMAT_VERSION = 2
_KEY = "format_version"


def with_version(content: JsonObject) -> JsonObject:
    """Return the content with the format version as its first key."""
    return {_KEY: FORMAT_VERSION, **content}


def check_not_newer(path: Path, content: JsonObject) -> None:
    """Check that the content of a file is not in a newer format.

    Raises:
        UserError: if a newer llmtrain has written it.
    """
    version = content.get(_KEY)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, but this llmtrain reads version "
            f"{FORMAT_VERSION}: upgrade llmtrain."
        )


def check_resumable(path: Path) -> None:
    """Check that a file of a run is in the current format. A file without a version passes.

    Raises:
        UserError: if another version of llmtrain has written the file.
    """
    version = read_versioned(path).get(_KEY)
    if isinstance(version, int) and version < FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, and this llmtrain resumes version "
            f"{FORMAT_VERSION}: finish the run with the llmtrain that has written it, or start a "
            "new run with --resume_from_checkpoint never."
        )


def has_version(content: JsonObject) -> bool:
    """Return whether the content of a file has the number of a format that is read."""
    version = content.get(_KEY)
    return type(version) is int and 1 <= version <= FORMAT_VERSION


def read_versioned(path: Path) -> JsonObject:
    """Return the JSON object in a file, or an empty one if the file cannot be read.

    Raises:
        UserError: if a newer llmtrain has written the file.
    """
    content = read_object(path)
    check_not_newer(path, content)
    return content
