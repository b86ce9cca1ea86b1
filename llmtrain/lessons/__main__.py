"""A process of a lesson: ``torchrun --nproc-per-node N -m llmtrain.lessons NAME``."""

import importlib
import sys

from llmtrain import launch


def main() -> None:
    """Run the lesson that the command line names."""
    importlib.import_module(f"llmtrain.lessons.{sys.argv[1]}").main()


if __name__ == "__main__":
    launch(main)
