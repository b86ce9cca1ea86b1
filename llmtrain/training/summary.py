"""Print what a finished run has learned: its loss curve, a sample, and how to use the model."""

import os
import shutil
import sys
from pathlib import Path

from llmtrain.console import note
from llmtrain.errors import first_line
from llmtrain.files import read_object
from llmtrain.models.export import gives_scores, how_to_load, module_class_of
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.observe.curve import loss_curve
from llmtrain.record.history import read_lines

_RULE = "-" * 40


def show_result(folder: Path, question: list[int] | None, opening: list[int]) -> None:
    """Print the loss curve of a finished run, a text by its model, and commands to go further.

    The run is saved already, so an error only prints a note.

    Args:
        folder: the run folder.
        question: the tokens of a question for the model to answer. If there are none, it writes a
            text of its choice.
        opening: the tokens that this text begins with, if the tokenizer has no token for that.
    """
    try:
        _show(folder, question, opening)
    except Exception as error:
        note(f"the run is finished; showing it failed: {first_line(error)}")


def _show(folder: Path, question: list[int] | None, opening: list[int]) -> None:
    print(loss_curve(read_lines(folder / "metrics.jsonl")))

    model_folder = folder / "model"
    if not _writes_text(model_folder):
        _print_how_to_load(model_folder)
        return

    model = TextModel(str(model_folder))
    if question is None:
        print(f"\n--- a sample of {model_folder} {_RULE}")
        _print_text(model, "" if model.can_begin else opening, Sampling(temperature=0.8))
    else:
        print(f"\n--- a question that is not in the training data {_RULE}")
        print(model.tokenizer.decode(question, skip_special_tokens=True))
        print(f"\n--- the answer of {model_folder} {_RULE}")
        _print_text(model, question or "", Sampling(temperature=0.3))
    print("\n" + "-" * 60)

    _print_how_to_load(model_folder)
    if question is None or model.tokenizer.chat_template is None:
        print(f'generate  {_command()} generate {folder} --prompt "Your text"', flush=True)
    else:
        print(f"chat      {_command()} chat {folder}", flush=True)


def _print_text(model: TextModel, prompt: str | list[int], sampling: Sampling) -> None:
    """Print a text token by token, as the model generates it."""
    for piece in model.stream(prompt, sampling):
        print(piece, end="", flush=True)


def _writes_text(model_folder: Path) -> bool:
    """Return whether the model in a folder is a language model of transformers with a tokenizer."""
    config = read_object(model_folder / "config.json")
    if gives_scores(config) or module_class_of(config):
        return False
    return (model_folder / "tokenizer_config.json").exists()


def _print_how_to_load(model_folder: Path) -> None:
    print(f"model     {model_folder}  ({how_to_load(model_folder)})", flush=True)


def _command() -> str:
    """Return how to call ``llmtrain``: by name, or by its path if it is not on ``PATH``."""
    next_to_python = Path(sys.executable).parent / "llmtrain"
    if shutil.which("llmtrain") or not next_to_python.exists():
        return "llmtrain"
    return os.path.relpath(next_to_python)
