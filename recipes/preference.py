"""Train a causal LM of Hugging Face's to prefer some answers to others, or a model that gives answers a score.

accelerate launch recipes/preference.py --model_name_or_path runs/finetune/model --dataset pairs.jsonl
"""

from __future__ import annotations

from typing import TypeAlias

import llmtrain as lt

Settings: TypeAlias = "lt.Settings[lt.ModelConfig, lt.DataConfig]"

DEFAULTS = lt.Settings(
    model=lt.ModelConfig(block_size=256),
    lora=lt.LoraConfig(),
    data=lt.DataConfig(
        dataset=["builtin:python-preferences"],
        tokenizer=None,
        eval_fraction=0.05,
        global_batch_size=8,
    ),
    chat=lt.PairConfig(),
    preference=lt.PreferenceConfig(),
    optim=lt.OptimConfig(max_steps=300, learning_rate=1e-6, warmup_steps=30, weight_decay=0.0),
    run=lt.RunConfig(output_dir="runs/preference"),
)


def tokenized(s: Settings) -> lt.Tokenized:
    if not s.model.model_name_or_path and not s.model.from_config:
        s.model.model_name_or_path = lt.newest_model("runs/finetune", "python recipes/finetune.py")
    s.model.fit_block_size()
    s.data.tokenizer = s.data.tokenizer or s.model.model_name_or_path or "bpe:2048"
    alone = s.preference is not None and s.preference.alone
    return lt.tokenize(
        s.data, s.model.block_size, s.chat, s.model.trust_remote_code, judged_alone=alone
    )


def build(s: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    return lt.load_model(
        s.model, s.lora, rows, s.loop.seed, precision, s.loop.bitwise, s.preference
    )


def main(argv: list[str] | None = None) -> object:
    s = lt.parse(DEFAULTS, argv, description=__doc__)
    s.optim.default(
        "learning_rate", 1e-5 if s.lora and s.lora.lora_r else 1e-6, "comparing answers"
    )
    rows = tokenized(s)
    accelerator = lt.start(s)
    bundle = lt.place(
        accelerator, build, s, rows
    )  # spread over the processes where the accelerate config asks for it
    optimizer = lt.make_optimizer(accelerator, bundle.model, s.optim)
    with lt.open_run(
        accelerator, s, rows, bundle
    ) as run:  # the folder, and what the first weights make of each answer
        batches, held_out = lt.loaders(run)
        lt.train(run, *accelerator.prepare(bundle.model, optimizer, batches, held_out))
    return run


if __name__ == "__main__":
    lt.launch(main)
