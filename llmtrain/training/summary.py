"""The end of a run, as a person sees it: the curve, a sample, and where everything is."""

import os
import shutil
import sys
from pathlib import Path

from llmtrain.console import note
from llmtrain.errors import first_line
from llmtrain.files import read_object
from llmtrain.models.export import gives_scores
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.observe.curve import loss_curve
from llmtrain.record.history import read_lines


def show_result(folder: Path, question: list[int] | None) -> None:
    """Print the loss curve of a finished run, a text by its model if it writes, and the command for more.

    With the tokens of a ``question`` the text is its answer. The run is over and kept: whatever fails here is a note.
    """
    try:
        _show(folder, question)
    except Exception as error:
        note(f"the run is finished; showing it failed: {first_line(error)}")


def _show(folder: Path, question: list[int] | None) -> None:
    print(loss_curve(read_lines(folder / "metrics.jsonl")))
    if gives_scores(read_object(folder / "model" / "config.json")):
        print(
            f"model     {folder / 'model'}  (transformers: AutoModelForSequenceClassification.from_pretrained)"
        )
        return
    model = TextModel(str(folder / "model"))
    if question is not None:
        print("\n--- a question that it was not trained on " + "-" * 40)
        print(model.tokenizer.decode(question, skip_special_tokens=True))
    print(f"\n--- {'the answer' if question else 'a sample'} of {folder / 'model'} " + "-" * 40)
    for piece in model.stream(
        question or "", Sampling(temperature=0.8 if question is None else 0.3)
    ):
        print(piece, end="", flush=True)
    print("\n" + "-" * 60)
    print(f"model     {folder / 'model'}  (transformers: AutoModelForCausalLM.from_pretrained)")
    more = f'generate  {_command()} generate {folder} --prompt "Return the"'
    print(more if question is None else f"chat      {_command()} chat {folder}", flush=True)


def _command() -> str:
    """Return how to call ``llmtrain`` from here: by name where it is on the path, else beside this Python."""
    beside = Path(sys.executable).parent / "llmtrain"
    return (
        "llmtrain" if shutil.which("llmtrain") or not beside.exists() else os.path.relpath(beside)
    )
