# /// script
# requires-python = ">=3.11"
# dependencies = ["llmtrain"]
# ///
"""Train a GPT from scratch on text, and save it as a model that Hugging Face can load.

accelerate launch --config_file accelerate_configs/cpu.yaml recipes/gpt.py --max_steps 100
"""

from __future__ import annotations

from dataclasses import dataclass

import llmtrain as lt


@dataclass
class Settings(lt.Settings):
    """The settings of this recipe: those of every recipe, and a model. Each section has flags."""

    data: lt.DataConfig
    model: lt.GPTConfig


DEFAULTS = Settings(
    model=lt.GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="lfm2"),
    data=lt.DataConfig(tokenizer="bpe:2048", eval_fraction=0.05, global_batch_size=32),
    optim=lt.OptimConfig(
        optim="muon",
        max_steps=120,
        learning_rate=2e-2,
        lr_scheduler_type="linear",
        warmup_steps=0.08,
    ),
    run=lt.RunConfig(output_dir="runs/gpt"),
)


def tokenized(settings: Settings) -> lt.Tokenized:
    """Tokenise the text, and pack it into rows on disk."""
    return lt.tokenize(settings.data, settings.model.block_size)


def build(settings: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    """Build the model, without memory for its weights; they are initialised when it is placed."""
    import torch  # not at the top, so that --help and mistakes in flags do not wait for it

    with torch.device("meta"):
        model = lt.build_gpt(settings.model, rows.vocabulary)
    return model.bundle(
        rows.tokenizer,
        trained_on=rows.metadata.dataset,
        seed=settings.optim.seed,
    )


def main(argv: list[str] | None = None) -> object:
    """Train the model."""
    settings = lt.parse(DEFAULTS, argv, description=__doc__)
    rows = tokenized(settings)  # before the process group exists
    accelerator = lt.start(settings)
    # The model is sharded over the processes if the accelerate config asks for it.
    bundle = lt.place(accelerator, build, settings, rows)
    optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
    # This opens the run folder, and chooses the checkpoint to resume from.
    with lt.open_run(accelerator, settings, rows, bundle, optimizer) as run:
        train_batches, eval_batches = lt.loaders(run)
        lt.train(
            run,
            *accelerator.prepare(bundle.model, optimizer, train_batches, eval_batches),
        )
    return run


if __name__ == "__main__":
    lt.launch(main)
