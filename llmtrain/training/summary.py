"""The end of a run: its loss curve, a sample, how to use the model, and its way to the hub."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np

from llmtrain.console import note, printable, say
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import first_line, hub_error
from llmtrain.interfaces.batches import IGNORED
from llmtrain.models.export import MODULE_CLASS, folder_config, gives_scores, how_to_load
from llmtrain.models.generation import Sampling
from llmtrain.observe.progress import loss_curve
from llmtrain.parallel.engine import Engine
from llmtrain.record.history import read_lines
from llmtrain.redaction import redacted
from llmtrain.training.compiling import eager_code
from llmtrain.training.evaluate import sample

# The most tokens of a text by the model, during a run and after it.
SAMPLE_TOKENS = 64
_RULE = "-" * 40


def eval_prompt(rows: Tokenized) -> list[int] | None:
    """Return the tokens before the first answer of an eval conversation, if there is one."""
    if rows.eval is None or rows.metadata.task == "text":
        return None
    ends = np.cumsum(rows.metadata.eval_source_rows).tolist()
    for end in reversed([end for end in ends if end > 0]):
        row = rows.eval[end - 1]
        first_target = next(i for i, label in enumerate(row["labels"]) if label != IGNORED)
        if first_target > 0:  # the first token of a row of text is a target
            return row["input_ids"][:first_target]
    return None


def final_sample(engine: Engine, rows: Tokenized, model_folder: Path) -> str | None:
    """Generate a text with the model of a finished run, for :func:`show_result`.

    All ranks call this. If every rank holds the full model, only rank 0 generates, and an error
    only prints a note, because the model is saved already.

    Args:
        engine: computes the model's outputs.
        rows: the rows of the run. The model answers a question of the eval rows if they have one,
            and writes a text of its choice otherwise.
        model_folder: the folder of the finished model, which rank 0 can read.

    Returns:
        The text; ``None`` if the model writes no text, or could not.
    """
    if not engine.ranks.on_main(lambda: _writes_text(model_folder)):
        return None

    def generate() -> str:
        question = eval_prompt(rows)
        # A low temperature works better for answers.
        temperature = 0.3 if question else 0.8
        with eager_code(engine.model):
            (text,) = sample(
                engine,
                rows.tokenizer,
                # The first token of a row begins a text.
                [question or rows.train[0]["input_ids"][:1]],
                Sampling(max_new_tokens=SAMPLE_TOKENS, temperature=temperature),
                stop_token_ids=rows.stop_token_ids,
            )
        return text

    if engine.ranks.is_sharded:
        # An error ends this rank: the others wait for its shards of the weights.
        return generate()
    try:
        # The others wait here. Without their heartbeats, rank 0 would end the run.
        return engine.ranks.on_main(generate)
    except Exception as error:
        if engine.ranks.is_main:
            note(f"the run is finished; its model wrote no sample: {first_line(error)}")
        return None


def show_result(folder: Path, rows: Tokenized, text: str | None) -> None:
    """Print the loss curve of a finished run, a text by its model, and commands to go further.

    The run is saved already, so an error only prints a note.

    Args:
        folder: the run folder.
        rows: the rows of the run.
        text: the result of :func:`final_sample`.
    """
    try:
        print(loss_curve(read_lines(folder / "metrics.jsonl")))
        model_folder = folder / "model"
        question = eval_prompt(rows)
        if text is not None:
            if question is None or rows.tokenizer is None:
                print(redacted(f"\n--- a sample of {model_folder} {_RULE}"))
            else:
                print(f"\n--- a question of the eval data {_RULE}")
                print(printable(str(rows.tokenizer.decode(question, skip_special_tokens=True))))
                print(redacted(f"\n--- the answer of {model_folder} {_RULE}"))
            print(printable(text))
            print("-" * 60)
        say("model", f"{model_folder}  ({how_to_load(model_folder)})")
        if rows.tokenizer is None or not _writes_text(model_folder):
            return
        if question is None or rows.tokenizer.chat_template is None:
            say("generate", f'{_command()} generate {folder} --prompt "Your text"')
        else:
            say("chat", f"{_command()} chat {folder}")
    except Exception as error:
        note(f"the run is finished; showing it failed: {first_line(error)}")


def _writes_text(model_folder: Path) -> bool:
    """Return whether the model in a folder is a language model of transformers with a tokenizer."""
    config = folder_config(model_folder)
    if gives_scores(config) or MODULE_CLASS in config:
        return False
    return (model_folder / "tokenizer_config.json").exists()


def _command() -> str:
    """Return how to call ``llmtrain``: by name, or by its path if it is not on ``PATH``."""
    next_to_python = Path(sys.executable).parent / "llmtrain"
    if shutil.which("llmtrain") or not next_to_python.exists():
        return "llmtrain"
    relative = os.path.relpath(next_to_python)
    return str(next_to_python) if relative.startswith("..") else relative


def publish(folder: Path, repository: str | None) -> None:
    """Upload a finished model's folder to the hub.

    The account is the one of ``hf auth login`` or of ``HF_TOKEN``. If the upload fails, a note says
    so, and the program continues: the model is still on the disk.

    Args:
        folder: the model's folder.
        repository: the name of the repository, which is made private if it does not exist. ``None``
            uploads nothing.
    """
    if repository is None:
        return
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="A model trained with llmtrain",
        )
        say("uploaded", f"{folder} to {repository}")
    except Exception as error:  # the hub has many types, for the login, network and name
        note(
            f"uploading to {repository} failed: {hub_error(error)}; to try again: "
            f"hf upload {repository} {folder}"
        )
