"""Train a GPT from scratch on text, and leave a model that Hugging Face can load.

accelerate launch --config_file accelerate_configs/cpu.yaml recipes/gpt.py --max_steps 100
"""

from __future__ import annotations

from typing import TypeAlias

import llmtrain as lt

Settings: TypeAlias = "lt.Settings[lt.GPTConfig, lt.DataConfig]"

DEFAULTS = lt.Settings(
    model=lt.GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="lfm2"),
    data=lt.DataConfig(tokenizer="bpe:2048", eval_fraction=0.05, global_batch_size=32),
    optim=lt.OptimConfig(
        optim="muon", max_steps=120, learning_rate=2e-2, lr_scheduler_type="linear", warmup_steps=10
    ),
    parallel=lt.PipelineConfig(),
    run=lt.RunConfig(output_dir="runs/gpt"),
)


def tokenized(s: Settings) -> lt.Tokenized:
    return lt.tokenize(
        s.data, s.model.block_size
    )  # text -> tokens -> rows on disk, before the process group exists


def build(s: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    import torch  # here: --help and what is wrong with a flag are said without it

    with torch.device("meta"):  # without memory: its weights come when it is placed
        model = lt.build_gpt(s.model, rows.vocabulary)
    return model.bundle(rows.tokenizer, trained_on=rows.facts.dataset, seed=s.loop.seed)


def main(argv: list[str] | None = None) -> object:
    s = lt.parse(DEFAULTS, argv, description=__doc__)
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
