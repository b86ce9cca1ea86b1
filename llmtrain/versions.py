"""The versions of installed packages."""

import importlib.metadata
import platform

from llmtrain._version import __version__

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")


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
