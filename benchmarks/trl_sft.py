"""The same 200 conversations through TRL's SFTTrainer and through recipes/finetune.py: how many tokens each trains, and
the loss of a first update that holds all of them.

python benchmarks/trl_sft.py        (needs: pip install 'llmtrain[bench]')
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", RANK="0")

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmtrain.data import builtin
from llmtrain.data.chat import set_template
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer

COUNT, MICRO, LENGTH = 200, 8, 512
ROOT = Path(__file__).resolve().parent.parent


def conversations() -> list[list[dict[str, str]]]:
    """Functions and their docstrings, some of them as two questions with their answers."""
    pairs = [pair for pair in builtin.function_pairs() if len("".join(pair)) < 700]
    turns = [[{"role": "user", "content": code}, {"role": "assistant", "content": said}] for code, said in pairs]
    return [turns[2 * i] + turns[2 * i + 1] if i % 4 == 0 else turns[2 * i] for i in range(COUNT)]


def write_base(folder: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    """A small random Llama with a tokenizer that has a chat template."""
    tokenizer = as_pretrained(train_tokenizer("bpe:1000", texts, lambda: iter(texts)), LENGTH)
    set_template(tokenizer, "chatml")
    tokenizer.pad_token = "<|endoftext|>"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def of_trl(chats: list[list[dict[str, str]]], base: Path, folder: Path) -> tuple[int, float]:
    import datasets
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder),
        assistant_only_loss=True,
        max_length=LENGTH,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=COUNT // MICRO,
        max_steps=1,
        logging_steps=1,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        seed=0,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(base),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"messages": chats}),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trained = sum(label != -100 for labels in trainer.train_dataset["labels"] for label in labels[1:])
    trainer.train()
    return trained, next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def of_llmtrain(chats: Path, base: Path, folder: Path, *flags: str) -> tuple[int, float]:
    command = [sys.executable, str(ROOT / "recipes" / "finetune.py"), "--dataset", str(chats), "--max_steps", "1"]
    command += ["--model_name_or_path", str(base), "--block_size", str(LENGTH - 1), "--overlong", "error"]
    command += ["--eval_fraction", "0", "--logging_steps", "1", "--report_to", "none", "--output_dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMTRAIN_CACHE": str(folder.parent / "cache")}
    subprocess.run([*command, *flags], check=True, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
    line = next(
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "train/loss" in line
    )
    return line["tokens"], line["train/loss"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, chats = Path(name), conversations()
        base, data = folder / "base", folder / "chats.jsonl"
        write_base(base, [message["content"] for chat in chats for message in chat])
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        one_a_row = ("--no_packing", "--global_batch_size", str(COUNT), "--per_device_train_batch_size", str(MICRO))
        packed = ("--global_batch_size", str(COUNT), "--per_device_train_batch_size", "4")
        found = {
            "TRL": of_trl(chats, base, folder / "trl"),
            "llmtrain, a conversation a row": of_llmtrain(data, base, folder / "rows", *one_a_row),
            "llmtrain, packed": of_llmtrain(data, base, folder / "packed", *packed),
        }
    print(f"{'':<34}{'trained tokens':>16}{'loss of step 1':>18}")
    for name, (tokens, loss) in found.items():
        print(f"{name:<34}{tokens:>16,}{loss:>18.6f}")


if __name__ == "__main__":
    main()
