"""Paths of the recipes and accelerate configs that come with this package."""

from pathlib import Path


def shipped_folder(folder: str) -> Path:
    """Return the path of ``recipes`` or ``accelerate_configs``.

    An installed package contains them. In a checkout, they are next to the package.
    """
    package = Path(__file__).parent
    installed = package / folder
    return installed if installed.is_dir() else package.parent / folder


def shipped_config(name: str) -> Path:
    """Return the path of an accelerate config, to show in a message.

    It is relative if the current folder is a checkout.
    """
    relative = Path("accelerate_configs") / f"{name}.yaml"
    return relative if relative.is_file() else shipped_folder("accelerate_configs") / relative.name
