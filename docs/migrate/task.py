"""What these files share: a model that exists already, and rows of text to train it on."""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

STEPS, BATCH, BLOCK = 20, 16, 64
LEARNING_RATE = 3e-3


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def rows() -> torch.Tensor:
    """Return [BATCH * STEPS, BLOCK + 1] tokens: Python's language reference, row after row."""
    text = "".join(topics.values()).encode("ascii", "ignore").decode()
    ids = torch.tensor(tokenizer()(text[: BATCH * STEPS * (BLOCK + 1)])["input_ids"])
    return ids.view(-1, BLOCK + 1)


def rows_with_labels() -> dict[str, list[list[int]]]:
    """Return the same text in rows of BLOCK tokens: a prompt, an answer with labels, padding."""
    ids = rows()[:, :BLOCK]
    lengths = 16 + torch.arange(len(ids)) * 7 % (BLOCK - 15)  # of prompt and answer
    is_answer = (torch.arange(BLOCK) >= 4) & (torch.arange(BLOCK) < lengths[:, None])
    return {"input_ids": ids.tolist(), "labels": ids.masked_fill(~is_answer, -100).tolist()}


def base_model(folder: str = "runs/migrate-base") -> str:
    """Return the folder of a small GPT-2, and make it if it does not exist."""
    if not Path(folder, "config.json").exists():
        torch.manual_seed(0)
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(
            vocab_size=256, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2, **still
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def tell(step: int, loss: float) -> None:
    """Print the loss of every fifth step."""
    if (step + 1) % 5 == 0:
        print(f"step {step + 1:>2}  loss {loss:.4f}", flush=True)


def leave() -> None:
    """Exit at once: gloo's threads sometimes abort a process that ends by itself."""
    sys.stdout.flush()
    os._exit(0)
