"""The lowest versions that setup.cfg allows.

``python -m tests.lowest_versions`` prints them as constraints for pip.
"""

import configparser
from pathlib import Path

from packaging.requirements import Requirement

SETUP = Path(__file__).resolve().parent.parent / "setup.cfg"


def requirements(*extras: str) -> list[Requirement]:
    """Return the packages that training needs, and those of the given extras."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)

    lines = setup["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += setup["options.extras_require"][extra].splitlines()
    return [Requirement(line) for line in lines if line]


def lowest(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows, such as ``torch==2.11``.

    Raises:
        ValueError: if the requirement has no ``>=``, so that it allows versions that nobody tried.
    """
    bounds = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"setup.cfg: {requirement} needs a lower bound, such as >=1.2")
    return f"{requirement.name}=={bounds[0]}"


if __name__ == "__main__":
    for requirement in requirements("lora", "lab"):
        print(lowest(requirement))
