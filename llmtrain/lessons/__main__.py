"""A process of a lesson: ``torchrun --nproc-per-node N -m llmtrain.lessons NAME``."""

import importlib
import sys

from llmtrain.launching.process import launch

if __name__ == "__main__":
    lesson = importlib.import_module(f"llmtrain.lessons.{sys.argv[1]}")
    launch(lesson.main)
