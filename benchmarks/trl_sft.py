"""The trained tokens and the first loss of the same 200 conversations, by TRL's SFTTrainer and by recipes/finetune.py.

The first update holds all of them.

python -m benchmarks.trl_sft        (needs: pip install 'llmtrain[bench]')
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", RANK="0")

from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.inputs import write_base
from benchmarks.runs import FINETUNE_RECIPE, flags, metrics, place, run, scratch
from llmtrain.data import builtin

COUNT, MICRO, LENGTH = 200, 8, 512


def conversations() -> list[list[dict[str, str]]]:
    """Return functions and their docstrings, some of them as two questions with their answers."""
    pairs = [pair for pair in builtin.function_pairs() if len("".join(pair)) < 700]
    turns = [
        [{"role": "user", "content": code}, {"role": "assistant", "content": said}]
        for code, said in pairs
    ]
    return [turns[2 * i] + turns[2 * i + 1] if i % 4 == 0 else turns[2 * i] for i in range(COUNT)]


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
    trained = sum(
        label != -100 for labels in trainer.train_dataset["labels"] for label in labels[1:]
    )
    trainer.train()
    return trained, next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def of_llmtrain(chats: Path, base: Path, folder: Path, **values: object) -> tuple[int, float]:
    words = flags(
        dataset=chats, max_steps=1, model_name_or_path=base, block_size=LENGTH - 1, overlong="error"
    )
    words += flags(eval_fraction=0, logging_steps=1, global_batch_size=COUNT, **values)
    variables = {"LLMTRAIN_CACHE": str(folder.parent / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    run([sys.executable, FINETUNE_RECIPE, *words, *place(folder)], threads=1, **variables)
    line = next(line for line in metrics(folder) if "train/loss" in line)
    return line["tokens"], line["train/loss"]


def main() -> None:
    with scratch() as folder:
        chats, base, data = conversations(), folder / "base", folder / "chats.jsonl"
        write_base(base, [message["content"] for chat in chats for message in chat], LENGTH)
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        one_a_row = {"no_packing": True, "per_device_train_batch_size": MICRO}
        found = {
            "TRL": of_trl(chats, base, folder / "trl"),
            "llmtrain, a conversation a row": of_llmtrain(data, base, folder / "rows", **one_a_row),
            "llmtrain, packed": of_llmtrain(
                data, base, folder / "packed", per_device_train_batch_size=4
            ),
        }
    print(f"{'':<34}{'trained tokens':>16}{'loss of step 1':>18}")
    for name, (tokens, loss) in found.items():
        print(f"{name:<34}{tokens:>16,}{loss:>18.6f}")


if __name__ == "__main__":
    main()
