"""The version of this package, and those of the packages that it depends on."""

__version__ = "0.1.0"

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")


def version_of(package: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    import importlib.metadata  # slow to import, and llmtrain itself imports this module

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that the numbers depend on."""
    import platform

    return {
        "python": platform.python_version(),
        "llmtrain": __version__,
        **{package: version_of(package) or "absent" for package in _PACKAGES},
    }
