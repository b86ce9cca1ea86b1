"""Print what a finished run has learned: its loss curve, a sample, and how to use the model."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np

from llmtrain.console import note, printable, say
from llmtrain.data.tokenized import Tokenized
from llmtrain.data.tokenizer import is_trained
from llmtrain.errors import first_line
from llmtrain.interfaces.batches import IGNORED
from llmtrain.model_folders import is_adapter
from llmtrain.models.export import folder_config, gives_scores, how_to_load, module_class_of
from llmtrain.models.generation import Sampling
from llmtrain.observe.curve import loss_curve
from llmtrain.parallel.engine import Engine
from llmtrain.record.history import read_lines
from llmtrain.redaction import redacted
from llmtrain.training.compiling import eager_code
from llmtrain.training.evaluate import sample

_RULE = "-" * 40


# The most tokens of a text by the model, during a run and after it.
SAMPLE_TOKENS = 64


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

    All ranks call this. Of a model that every rank holds, rank 0 alone generates, and an error only
    prints a note, because the model is saved already.

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
        # The likelier tokens answer a question best.
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
        _show(folder, rows, text)
    except Exception as error:
        note(f"the run is finished; showing it failed: {first_line(error)}")


def _show(folder: Path, rows: Tokenized, text: str | None) -> None:
    print(loss_curve(read_lines(folder / "metrics.jsonl")))

    model_folder = folder / "model"
    if rows.tokenizer is None or not _writes_text(model_folder):
        _print_how_to_load(model_folder)
        return

    question = eval_prompt(rows)
    if text is not None:
        if question is None:
            print(redacted(f"\n--- a sample of {model_folder} {_RULE}"))
        else:
            print(f"\n--- a question that is not in the training data {_RULE}")
            print(printable(str(rows.tokenizer.decode(question, skip_special_tokens=True))))
            print(redacted(f"\n--- the answer of {model_folder} {_RULE}"))
        print(printable(text))
        print("-" * 60)

    _print_how_to_load(model_folder)
    if question is None or rows.tokenizer.chat_template is None:
        say("generate", f'{_command()} generate {folder} --prompt "Your text"')
    else:
        say("chat", f"{_command()} chat {folder}")
    say("serve", _servers(model_folder, is_trained(rows.metadata.tokenizer)))


def _servers(model_folder: Path, has_own_tokenizer: bool) -> str:
    """Return which servers read a language model, in a few words.

    Args:
        model_folder: the finished model.
        has_own_tokenizer: whether the run has trained its tokenizer.
    """
    if is_adapter(model_folder):
        return f"those that know its base, after {_command()} export {model_folder.parent} --merge"
    config = folder_config(model_folder)
    # The head of vLLM's LFM2 is always tied to the embeddings.
    is_untied_lfm2 = config["model_type"] == "lfm2" and not config.get("tie_word_embeddings")
    servers = "SGLang" if is_untied_lfm2 else f"vLLM or SGLang, if it knows {config['model_type']}"
    # llama.cpp knows tokenizers by the hash of what they make of a text.
    if has_own_tokenizer:
        return servers
    return f"{servers}; llama.cpp or Ollama, if the tokenizer is a published one"


def _writes_text(model_folder: Path) -> bool:
    """Return whether the model in a folder is a language model of transformers with a tokenizer."""
    config = folder_config(model_folder)
    if gives_scores(config) or module_class_of(config):
        return False
    return (model_folder / "tokenizer_config.json").exists()


def _print_how_to_load(model_folder: Path) -> None:
    say("model", f"{model_folder}  ({how_to_load(model_folder)})")


def _command() -> str:
    """Return how to call ``llmtrain``: by name, or by its path if it is not on ``PATH``."""
    next_to_python = Path(sys.executable).parent / "llmtrain"
    if shutil.which("llmtrain") or not next_to_python.exists():
        return "llmtrain"
    return os.path.relpath(next_to_python)
