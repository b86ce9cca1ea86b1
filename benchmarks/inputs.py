"""Texts, conversations, tokenizers and models that contenders are given."""

import json
import sysconfig
from pathlib import Path

from llmtrain.data import builtin
from llmtrain.data.chat_template import set_template
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer

CHARACTERS = 1_115_394  # as many as tinyshakespeare has


def write_code(path: Path, megabytes: int) -> int:
    """Write the Python files of this interpreter and its packages, a document each; returns their bytes."""
    size = 0
    with path.open("w") as file:
        for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
            for source in sorted(Path(folder).rglob("*.py")):
                text = source.read_bytes().decode(errors="replace")
                if text.strip() and size < megabytes * 10**6:
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return size


def letters_of_docs() -> str:
    """Return Python's documentation in ASCII, as long as tinyshakespeare."""
    text = "".join(record["text"] for record in builtin.python_docs())
    return text.encode("ascii", "ignore").decode()[:CHARACTERS]


def write_chats(file: Path) -> list[str]:
    """Write every function with its docstring, where they fit in a row, as a conversation; returns the texts."""
    pairs = [pair for pair in builtin.function_pairs() if len("".join(pair)) < 1200]
    with file.open("w") as lines:
        for code, said in pairs:
            messages = [{"role": "user", "content": code}, {"role": "assistant", "content": said}]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return [text for pair in pairs for text in pair]


def write_pairs(file: Path, count: int) -> list[str]:
    """Write functions with their docstrings and wrong ones, where they fit in a row, as pairs; returns the texts."""
    pairs = [pair for pair in builtin.python_preferences() if len("".join(pair.values())) < 1800]
    pairs = pairs[:: len(pairs) // count][:count]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [text for pair in pairs for text in pair.values()]


def write_tokenizer(folder: Path, chat: bool = False) -> None:
    """Write a tokenizer of 4,096 tokens; for conversations it has a template."""
    texts = [record["text"] for record in builtin.python_docs()]
    tokenizer = as_pretrained(train_tokenizer("bpe:4096", texts, lambda: iter(texts)), 256)
    if chat:
        set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def write_base(folder: Path, texts: list[str], length: int = 512, width: int = 128) -> None:
    """Write a small random Llama with a tokenizer that has a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = as_pretrained(train_tokenizer("bpe:1000", texts, lambda: iter(texts)), length)
    set_template(tokenizer, "chatml")
    tokenizer.pad_token = "<|endoftext|>"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
