"""On one GPU, in less than nine minutes: GPT-2 beside nanoGPT's loop, a Llama of a billion weights with checkpointing,
LoRA on one of 8 billion beside TRL, and a text by letters at nanoGPT's shape for GPUs, to 1.47 nats.

python -m benchmarks.gpu --nanogpt FOLDER [--text FILE] [--rehearse]

With --rehearse everything runs at a tiny size on the CPU, and its figures mean nothing.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.comparison import Row, in_turn, report
from benchmarks.data import write_tokenizer
from benchmarks.runs import FINETUNE_RECIPE, GPT_RECIPE, newest, peer, recipe, scratch
from benchmarks.sft import write_chats
from benchmarks.time_to_loss import tuned_on
from llmtrain import UserError, launch, say

Shape = tuple[int, int, int, int, int]  # layers, heads, width, block, batch


@dataclass(frozen=True)
class Sizes:
    gpt2: Shape = (12, 12, 768, 1024, 16)
    vocabulary: int = 50_304  # of GPT-2, to a multiple of 128, as nanoGPT has it
    letters: Shape = (6, 6, 384, 256, 64)
    letters_updates: int = 900
    billion: tuple[int, int, int] = (20, 2048, 5632)  # layers, width, inner width
    eight_billion: tuple[int, int, int] = (32, 4096, 14_336)
    length: int = 1024
    updates: int = 60
    device: str = "cuda"

    @property
    def config(self) -> str:
        return "single_gpu" if self.device == "cuda" else "cpu"


TINY = Sizes((2, 2, 32, 64, 4), 5000, (2, 2, 32, 32, 8), 40, (2, 64, 128), (2, 64, 128), 128, 30, "cpu")


def flags_of(shape: Shape) -> list[str]:
    names = ("--n_layer", "--n_head", "--n_embd", "--block_size", "--global_batch_size")
    flags = [word for name, value in zip(names, shape, strict=True) for word in (name, str(value))]
    return [*flags, "--per_device_train_batch_size", str(shape[-1]), "--save_steps", "100000"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in newest(folder, "metrics.jsonl").read_text().splitlines()]


def mfu(folder: Path) -> float:
    return statistics.median(line["train/mfu"] for line in lines(folder)[1:] if "train/mfu" in line)


def write_gpt2_tokenizer(folder: Path, vocabulary: int) -> Path:
    """A tokenizer of a few thousand tokens, with as many again that no text has: a head as large as GPT-2's."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    known = content["model"]["vocab"]
    first = 1 + max(known.values(), default=0)
    known |= {f"<unused {number}>": number for number in range(first, vocabulary)}
    file.write_text(json.dumps(content))
    return folder


def gpt2(sizes: Sizes, nanogpt: str, folder: Path) -> list[Row]:
    tokens, tokenizer = folder / "tokens", write_gpt2_tokenizer(folder / "tokenizer", sizes.vocabulary)
    np.random.default_rng(0).integers(sizes.vocabulary, size=2_000_000, dtype=np.uint16).tofile(tokens)
    flags = [*flags_of(sizes.gpt2), "--tokenizer", str(tokenizer), "--eval_fraction", "0", "--optim", "adamw"]
    flags += ["--max_steps", str(sizes.updates), "--torch_compile", "always"]
    theirs = [nanogpt, "--tokens", tokens, "--vocabulary", sizes.vocabulary, "--steps", sizes.updates]
    theirs += ["--shape", *sizes.gpt2, "--bf16", "--fused", "--compile", "--device", sizes.device]
    run = folder / "gpt2"
    found = in_turn(
        {
            "ours": partial(recipe, GPT_RECIPE, run, *flags, config=sizes.config, precision="bf16"),
            "theirs": partial(peer, "nanogpt", *theirs),
        },
        rounds=2,
        uncounted=0,
    )
    work = "GPT-2, block {3:,}, batch {4}, bf16, compiled".format(*sizes.gpt2)
    return [
        Row(work, "nanoGPT", found["ours"].value, found["theirs"].value, "tokens/s", ">= 1.2"),
        Row(work, "the device's peak", mfu(run), 1.0, "of FLOP/s", ">= 0.45"),
    ]


def write_llama(folder: Path, shape: tuple[int, int, int], length: int) -> Path:
    """A config without weights, and a tokenizer with a chat template."""
    layers, width, inner = shape
    write_tokenizer(folder, chat=True)
    LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 2),
        num_key_value_heads=max(width // 512, 1),
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


def llamas(sizes: Sizes, folder: Path) -> list[Row]:
    """The share of the peak of a billion weights, for which there is no peer; 8 billion with LoRA beside TRL."""
    write_chats(chats := folder / "chats.jsonl")

    def ours(model: Path, *more: str) -> float:
        flags = [
            "--from_config",
            str(model),
            "--tokenizer",
            str(model),
            "--dataset",
            str(chats),
            "--eval_fraction",
            "0",
        ]
        flags += [
            "--block_size",
            str(sizes.length - 1),
            "--global_batch_size",
            "8",
            "--per_device_train_batch_size",
            "8",
        ]
        flags += ["--gradient_checkpointing", "--save_steps", "100000", "--max_steps", str(sizes.updates)]
        flags += ["--learning_rate", "1e-4"]
        return recipe(FINETUNE_RECIPE, folder / "run", *flags, *more, config=sizes.config, precision="bf16")

    billion = write_llama(folder / "billion", sizes.billion, sizes.length)
    trained, share = ours(billion), mfu(folder / "run")
    say("tokens/s", f"Llama, a billion weights, checkpointing: {trained:,.0f} trained")
    eight = write_llama(folder / "eight", sizes.eight_billion, sizes.length)
    trained = ours(eight, "--lora_r", "16")
    audit = json.loads(newest(folder / "run", "run.json").read_text())["audit"]
    flags = {"packing": True, "bf16": True, "gradient_checkpointing": True}
    theirs = [eight, chats, "--batch", 8, "--length", sizes.length, "--steps", sizes.updates, "--device", sizes.device]
    speed = peer("sft", *theirs, "--flags", json.dumps(flags), "--random_weights", "--lora", 16)
    work = "Llama, 8 billion weights, LoRA, checkpointing, bf16"
    return [
        Row("Llama, a billion weights, checkpointing, bf16", "the device's peak", share, 1.0, "of FLOP/s", ">= 0.4"),
        Row(work, "TRL, packed", trained * audit["tokens"] / audit["trained"], speed, "tokens/s", ">= 1"),
    ]


def letters(sizes: Sizes, text: Path, folder: Path) -> Row:
    """Seconds of training until an evaluation finds 1.47 nats; where none does, of the whole run, and the loss is said.
    Evaluations and what comes before the first update are left out."""
    flags = [*flags_of(sizes.letters), "--dataset", str(text), "--tokenizer", "char", "--eval_fraction", "0.1"]
    flags += ["--dropout", "0.2", "--max_steps", str(sizes.letters_updates), "--torch_compile", "always"]
    flags += ["--eval_steps", str(sizes.letters_updates // 9), "--logging_steps", str(sizes.letters_updates // 18)]
    speed = recipe(GPT_RECIPE, folder / "letters", *flags, config=sizes.config, precision="bf16")
    losses = {line["step"]: line["eval/loss"] for line in lines(folder / "letters") if "eval/loss" in line}
    say("nats", f"{text.stem}: {', '.join(f'{loss:.3f} at {step}' for step, loss in losses.items())}")
    there = next((step for step, loss in losses.items() if loss <= 1.47), sizes.letters_updates)
    seconds = there * sizes.letters[3] * sizes.letters[4] / speed
    return Row(f"{text.stem} by letters, to {min(losses.values()):.3f} nats", "a minute", seconds, 60.0, "s", "<= 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text; tinyshakespeare, say")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("there is no GPU here; --rehearse tries everything at a tiny size on the CPU.")
    sizes = TINY if arguments.rehearse else Sizes()
    with scratch() as folder:
        text = arguments.text or folder / "python-docs.txt"
        if not arguments.text:
            text.write_text(tuned_on())
        rows = [letters(sizes, text, folder), *gpt2(sizes, arguments.nanogpt, folder), *llamas(sizes, folder)]
    report("rehearsal" if arguments.rehearse else "gpu", rows)


if __name__ == "__main__":
    launch(main)
