"""GPT-2, Llamas and a text by letters on one GPU, in less than nine minutes.

GPT-2 beside nanoGPT's loop, a Llama of a billion weights with checkpointing, LoRA on one of 8 billion beside TRL, and a
text by letters at nanoGPT's shape for GPUs, to 1.47 nats.

python -m benchmarks.gpu --nanogpt FOLDER [--text FILE] [--rehearse] [letters gpt2 billion lora]

With --rehearse everything runs at a tiny size on the CPU, and its figures mean nothing. It needs trl and peft.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.comparison import RESULTS, Row, in_turn, report
from benchmarks.inputs import letters_of_docs, write_chats, write_tokenizer
from benchmarks.runs import (
    FINETUNE_RECIPE,
    GPT_RECIPE,
    UPDATES_ALONE,
    flags,
    gpt_flags,
    median_reading,
    metrics,
    peer,
    recipe,
    run,
    scratch,
    with_ignored,
)
from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.launching.process import launch

Shape = tuple[int, int, int, int, int]  # layers, heads, width, block, batch
Llama = tuple[int, int, int]  # layers, width, inner width


@dataclass(frozen=True)
class Sizes:
    gpt2: Shape = (12, 12, 768, 1024, 16)
    gpt2_vocabulary: int = 50_304  # to a multiple of 128, as nanoGPT has it
    letters: Shape = (6, 6, 384, 256, 64)
    letters_updates: int = 900
    billion: Llama = (20, 2048, 5632)
    eight_billion: Llama = (32, 4096, 14_336)
    llama_vocabulary: int = 128_256
    length: int = 1024
    updates: int = 40
    device: str = "cuda"

    @property
    def config(self) -> str:
        return "single_gpu" if self.device == "cuda" else "cpu"


TINY = Sizes(
    gpt2=(2, 2, 32, 64, 4),
    gpt2_vocabulary=5000,
    letters=(2, 2, 32, 32, 8),
    letters_updates=40,
    billion=(2, 64, 128),
    eight_billion=(2, 64, 128),
    llama_vocabulary=6000,
    length=128,
    updates=30,
    device="cpu",
)


def write_larger_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Write a tokenizer of a few thousand tokens, and more that no text has: for a head of a known size."""
    write_tokenizer(folder, chat=True)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    first = 1 + max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"]))
    content["model"]["vocab"] |= {f"<unused {number}>": number for number in range(first, vocabulary)}
    file.write_text(json.dumps(content))
    return folder


def letters(sizes: Sizes, folder: Path, text: Path) -> list[Row]:
    """Return the seconds of training until an evaluation finds 1.47 nats.

    Evaluations do not count, nor does what comes before the first update.
    """
    updates, every = sizes.letters_updates, sizes.letters_updates // 9
    words = gpt_flags(*sizes.letters) + flags(dataset=text, tokenizer="char", eval_fraction=0.1, dropout=0.2)
    words += flags(max_steps=updates, eval_steps=every, logging_steps=updates // 18, save_steps=100_000)
    words += flags(torch_compile="always")
    speed = recipe(GPT_RECIPE, folder / "letters", *words, config=sizes.config, precision="bf16")
    found = [line["eval/loss"] for line in metrics(folder / "letters") if "eval/loss" in line]
    losses = {number * every: loss for number, loss in enumerate(found)}
    say("nats", f"{text.stem}: {', '.join(f'{loss:.3f} at {step}' for step, loss in losses.items())}")
    there = next((step for step, loss in losses.items() if loss <= 1.47), None)
    seconds = float("inf") if there is None else there * sizes.letters[3] * sizes.letters[4] / speed
    return [Row(f"{text.stem} by letters, to 1.47 nats", "a minute", seconds, 60.0, "seconds", "<= 1")]


def gpt2(sizes: Sizes, folder: Path, nanogpt: str) -> list[Row]:
    tokens = folder / "tokens"
    tokenizer = write_larger_tokenizer(folder / "gpt2-tokenizer", sizes.gpt2_vocabulary)
    np.random.default_rng(0).integers(sizes.gpt2_vocabulary, size=2_000_000, dtype=np.uint16).tofile(tokens)
    words = gpt_flags(*sizes.gpt2) + flags(tokenizer=tokenizer, optim="adamw", learning_rate=6e-4)
    words += flags(max_steps=sizes.updates, torch_compile="always", **UPDATES_ALONE)
    theirs = [nanogpt, "--tokens", tokens, "--vocabulary", sizes.gpt2_vocabulary, "--steps", sizes.updates]
    theirs += ["--shape", *sizes.gpt2, "--bf16", "--fused", "--compile", "--device", sizes.device]
    found = in_turn(
        {
            "ours": partial(recipe, GPT_RECIPE, folder / "gpt2", *words, config=sizes.config, precision="bf16"),
            "theirs": partial(peer, "nanogpt", *theirs),
        },
        rounds=1,
        uncounted=0,
        retries=0,
    )
    work = "GPT-2, block {3:,}, batch {4}, bf16, compiled".format(*sizes.gpt2)
    return [
        Row(work, "nanoGPT", found["ours"].value, found["theirs"].value, "tokens/s", ">= 1.2"),
        Row(work, "the device's peak", median_reading(folder / "gpt2", "train/mfu"), 1.0, "of FLOP/s", ">= 0.45"),
    ]


def llama_config(sizes: Sizes, shape: Llama) -> LlamaConfig:
    layers, width, inner = shape
    return LlamaConfig(
        vocab_size=sizes.llama_vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 2),
        num_key_value_heads=max(width // 512, 1),
        max_position_embeddings=sizes.length,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def finetune(sizes: Sizes, folder: Path, **model: object) -> float:
    words = flags(**model, block_size=sizes.length - 1, global_batch_size=8, per_device_train_batch_size=8)
    words += flags(gradient_checkpointing=True, learning_rate=1e-4, max_steps=sizes.updates, **UPDATES_ALONE)
    return recipe(FINETUNE_RECIPE, folder, *words, config=sizes.config, precision="bf16")


def billion(sizes: Sizes, folder: Path) -> list[Row]:
    """Train all weights on text; there is no peer."""
    model = write_larger_tokenizer(folder / "billion", sizes.llama_vocabulary)
    llama_config(sizes, sizes.billion).save_pretrained(model)
    speed = finetune(sizes, folder / "run", dataset="builtin:python-docs", from_config=model, tokenizer=model)
    say("tokens/s", f"Llama, a billion weights, all trained, checkpointing: {speed:,.0f}")
    work = "Llama, a billion weights, checkpointing, bf16"
    return [Row(work, "the device's peak", median_reading(folder / "run", "train/mfu"), 1.0, "of FLOP/s", ">= 0.4")]


def write_random_llama(sizes: Sizes, folder: Path) -> None:
    with torch.device(sizes.device):
        model = LlamaForCausalLM._from_config(llama_config(sizes, sizes.eight_billion), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def lora(sizes: Sizes, folder: Path, rehearse: bool) -> list[Row]:
    """Compare all tokens of conversations, trained on or not. Both start from the same random weights."""
    write_chats(chats := folder / "chats.jsonl")
    base = write_larger_tokenizer(folder / "eight", sizes.llama_vocabulary)
    again = ["--write_base", str(base), *(["--rehearse"] if rehearse else [])]
    run([sys.executable, "-m", "benchmarks.gpu", *again])  # in a process of its own, that leaves the GPU empty
    trained = finetune(sizes, folder / "lora", dataset=chats, model_name_or_path=base, lora_r=16)
    settings: dict[str, object] = {"packing": True, "bf16": True, "gradient_checkpointing": True}
    settings["model_init_kwargs"] = {"dtype": "bfloat16"}
    theirs = [base, chats, "--batch", 8, "--length", sizes.length, "--steps", sizes.updates, "--device", sizes.device]
    speed = peer("sft", *theirs, "--flags", json.dumps(settings), "--lora", 16)
    work = "Llama, 8 billion weights, LoRA, checkpointing, bf16"
    return [Row(work, "TRL, packed, sdpa", with_ignored(folder / "lora", trained), speed, "tokens/s", ">= 1")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="letters gpt2 billion lora; all of them where none is named")
    parser.add_argument("--nanogpt", help="a checkout of github.com/karpathy/nanoGPT, for gpt2")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text; tinyshakespeare, say")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--write_base", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("there is no GPU here; --rehearse tries everything at a tiny size on the CPU.")
    sizes = TINY if arguments.rehearse else Sizes()
    if arguments.write_base:
        return write_random_llama(sizes, arguments.write_base)
    device = "a rehearsal" if arguments.rehearse else torch.cuda.get_device_name()
    with scratch() as folder:
        text = arguments.text or folder / "python-docs.txt"
        if not arguments.text:
            text.write_text(letters_of_docs())
        sections = {
            "letters": partial(letters, sizes, folder, text),
            "gpt2": partial(gpt2, sizes, folder, arguments.nanogpt),
            "billion": partial(billion, sizes, folder),
            "lora": partial(lora, sizes, folder, arguments.rehearse),
        }
        if unknown := set(arguments.sections) - set(sections):
            parser.error(f"no section {', '.join(sorted(unknown))}: there are {' '.join(sections)}")
        for name in arguments.sections or sections:
            if name == "gpt2" and not arguments.nanogpt:
                say("skipped", "gpt2: it needs --nanogpt FOLDER")
                continue
            rows, place = sections[name](), folder if arguments.rehearse else RESULTS
            report(f"gpu_{name}", rows, place, device=device)  # at once: time may run out


if __name__ == "__main__":
    launch(main)
