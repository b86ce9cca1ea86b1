"""Texts, conversations, tokenizers and models that the contenders of a table share."""

import json
import sysconfig
from pathlib import Path
from typing import Any

from llmtrain.data import builtin
from llmtrain.data.tokenizer import as_pretrained, set_template, train_tokenizer

TINYSHAKESPEARE_CHARACTERS = 1_115_394


def write_python_files(path: Path, megabytes: int) -> int:
    """Write Python files of this interpreter and its packages as JSON lines.

    Args:
        path: the file to write. Each line is a document.
        megabytes: the size of all texts after which no further document is written.

    Returns:
        The bytes of all texts.
    """
    size = 0
    with path.open("w") as file:
        for library in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
            for source in sorted(Path(library).rglob("*.py")):
                if size >= megabytes * 10**6:
                    return size
                text = source.read_bytes().decode(errors="replace")
                if text.strip():
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return size


def ascii_of_python_docs() -> str:
    """Return Python's documentation in ASCII, cut to the length of tinyshakespeare."""
    text = "".join(document["text"] for document in builtin.python_docs())
    return text.encode("ascii", "ignore").decode()[:TINYSHAKESPEARE_CHARACTERS]


def write_conversations_of_functions(path: Path) -> list[str]:
    """Write functions and their docstrings as conversations that fit into a row.

    Returns:
        The texts of all messages, to train a tokenizer on.
    """
    texts: list[str] = []
    with path.open("w") as file:
        for code, docstring in builtin.function_pairs():
            if len(code) + len(docstring) >= 1200:
                continue
            messages = [
                {"role": "user", "content": code},
                {"role": "assistant", "content": docstring},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
            texts += [code, docstring]
    return texts


def write_preference_pairs(path: Path, count: int) -> list[str]:
    """Write functions with their own and with wrong docstrings as pairs that fit into a row.

    Returns:
        The texts of all prompts and answers, to train a tokenizer on.
    """
    pairs = [pair for pair in builtin.python_preferences() if len("".join(pair.values())) < 1800]
    evenly_spaced = pairs[:: len(pairs) // count][:count]

    texts: list[str] = []
    with path.open("w") as file:
        for pair in evenly_spaced:
            file.write(json.dumps(pair) + "\n")
            texts += pair.values()
    return texts


def write_tokenizer(folder: Path, has_template: bool = False) -> None:
    """Write a tokenizer of 4,096 tokens, with the template ``chatml`` if conversations need it."""
    texts = [document["text"] for document in builtin.python_docs()]
    tokenizer = as_pretrained(train_tokenizer("bpe:4096", texts, lambda: iter(texts)), 256)
    if has_template:
        set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def write_llama(
    folder: Path,
    texts: list[str],
    length: int,
    width: int = 128,
    layers: int = 4,
    vocabulary: int = 1000,
    **config_values: object,
) -> None:
    """Write a small Llama with random weights, and a tokenizer with the template ``chatml``.

    Args:
        folder: where to write both.
        texts: the tokenizer is trained on them.
        length: the largest number of tokens of a row.
        width: the size of a hidden state.
        layers: transformer blocks.
        vocabulary: the tokens of the tokenizer.
        **config_values: further values of the configuration.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    trained = train_tokenizer(f"bpe:{vocabulary}", texts, lambda: iter(texts))
    tokenizer = as_pretrained(trained, length)
    set_template(tokenizer, "chatml")
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": length,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **config_values,
    }
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
