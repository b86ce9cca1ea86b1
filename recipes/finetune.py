"""Fine-tune a causal LM of Hugging Face's on conversations, or go on training it on text.

accelerate launch recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16
"""

from __future__ import annotations

from typing import TypeAlias

import llmtrain as lt

Settings: TypeAlias = "lt.Settings[lt.ModelConfig, lt.DataConfig]"

DEFAULTS = lt.Settings(
    model=lt.ModelConfig(from_config="llama", block_size=256),
    lora=lt.LoraConfig(),
    data=lt.DataConfig(
        dataset=["builtin:python-functions"],
        tokenizer=None,
        eval_fraction=0.02,
        global_batch_size=8,
    ),
    chat=lt.ChatConfig(),
    optim=lt.OptimConfig(max_steps=600, learning_rate=5e-3, warmup_steps=30, weight_decay=0.01),
    run=lt.RunConfig(output_dir="runs/finetune"),
)


def tokenized(s: Settings) -> lt.Tokenized:
    s.model.fit_block_size()
    s.data.tokenizer = s.data.tokenizer or s.model.model_name_or_path or "bpe:2048"
    return lt.tokenize(s.data, s.model.block_size, s.chat, s.model.trust_remote_code)


def build(s: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    return lt.load_model(s.model, s.lora, rows, s.loop.seed, precision, s.loop.bitwise)


def main(argv: list[str] | None = None) -> object:
    s = lt.parse(DEFAULTS, argv, description=__doc__)
    if s.model.model_name_or_path:  # what has been trained before is trained on gently
        s.optim.default(
            "learning_rate",
            2e-4 if s.lora and s.lora.lora_r else 2e-5,
            "a model that was trained before",
        )
    rows = tokenized(s)
    accelerator = lt.start(s)
    bundle = lt.place(
        accelerator, build, s, rows
    )  # spread over the processes where the accelerate config asks for it
    optimizer = lt.make_optimizer(accelerator, bundle.model, s.optim)
    with lt.open_run(
        accelerator, s, rows, bundle
    ) as run:  # the folder, and which checkpoint it goes on from
        batches, held_out = lt.loaders(run)
        lt.train(run, *accelerator.prepare(bundle.model, optimizer, batches, held_out))
    return run


if __name__ == "__main__":
    lt.launch(main)
