"""The version of a run's files on disk. Files of a newer version are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.files import read_object

if TYPE_CHECKING:
    from llmtrain.json_types import JsonObject

# The version of run.json, state.json and MANIFEST.json. Raise it when a reader must change.
FORMAT_VERSION = 1
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


def version_fault(name: str, content: JsonObject) -> str | None:
    """Return a description of the fault if a file does not have the current format version.

    Args:
        name: the name of the file, for the description.
        content: the content of the file.

    Returns:
        ``None`` if the version is current.
    """
    version = content.get(_KEY)
    if type(version) is int and version == FORMAT_VERSION:
        return None
    return f"{name} has format version {version}, not {FORMAT_VERSION}"


def read_versioned(path: Path) -> JsonObject:
    """Return the JSON object in a file, or an empty one if the file cannot be read.

    Raises:
        UserError: if a newer llmtrain has written the file.
    """
    content = read_object(path)
    check_not_newer(path, content)
    return content
