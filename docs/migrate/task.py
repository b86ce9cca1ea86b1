"""What all four steps share: a model that is there already, and rows of text to train it on."""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

UPDATES, BATCH, BLOCK = 20, 16, 64
LEARNING_RATE = 3e-3


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def rows() -> torch.Tensor:
    """[BATCH * UPDATES, BLOCK + 1]: Python's language reference, a row after the other."""
    text = "".join(topics.values()).encode("ascii", "ignore").decode()
    ids = torch.tensor(tokenizer()(text[: BATCH * UPDATES * (BLOCK + 1)])["input_ids"])
    return ids.view(-1, BLOCK + 1)


def base_model(folder: str = "runs/migrate-base") -> str:
    """A small GPT-2's folder, made where it is not there yet."""
    if not Path(folder, "config.json").exists():
        torch.manual_seed(0)
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(
            vocab_size=256, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2, **still
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def tell(step: int, loss: float) -> None:
    if (step + 1) % 5 == 0:
        print(f"update {step + 1:>2}  loss {loss:.4f}", flush=True)


def leave() -> None:
    """End here and now: left to itself, a process now and then dies of its gloo threads after its work is done."""
    sys.stdout.flush()
    os._exit(0)
