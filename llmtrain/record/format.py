"""The version of the format in which a run is written to the disk, and the refusal of newer ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.files import read_object

if TYPE_CHECKING:
    from llmtrain.types import Facts

FORMAT_VERSION = 1  # of run.json, state.json and MANIFEST.json; raise it when a reader must change
_KEY = "format_version"


def with_version(content: Facts) -> Facts:
    """Return the content with the format version in front."""
    return {_KEY: FORMAT_VERSION, **content}


def check_not_newer(path: Path, content: Facts) -> None:
    """Raise :class:`UserError` if a newer llmtrain has written this content of ``path``."""
    version = content.get(_KEY)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, but this llmtrain reads version "
            f"{FORMAT_VERSION}: upgrade llmtrain."
        )


def version_fault(name: str, content: Facts) -> str | None:
    """Return what is wrong with the format version of a file that must have this one."""
    version = content.get(_KEY)
    if type(version) is int and version == FORMAT_VERSION:
        return None
    return f"{name} has format version {version}, not {FORMAT_VERSION}"


def read_versioned(path: Path) -> Facts:
    """Return the JSON object of a file, empty if it cannot be read.

    Raises:
        UserError: a newer llmtrain has written the file.
    """
    content = read_object(path)
    check_not_newer(path, content)
    return content
