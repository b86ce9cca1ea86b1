"""Paths of the recipes and accelerate configs of this package."""

from pathlib import Path


def shipped(folder: str) -> Path:
    """Return where ``recipes`` or ``accelerate_configs`` are: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent
    return package / folder if (package / folder).is_dir() else package.parent / folder


def shipped_config(name: str) -> Path:
    """Return an accelerate config as a person names it from here: relative in a checkout, else where it is."""
    there = Path("accelerate_configs") / f"{name}.yaml"
    return there if there.is_file() else shipped("accelerate_configs") / there.name
