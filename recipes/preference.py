# /// script
# requires-python = ">=3.11"
# dependencies = ["llmtrain[lora]"]
# ///
"""Train a causal language model of Hugging Face on preferences between answers, or a reward model.

accelerate launch recipes/preference.py --model_name_or_path runs/finetune --dataset my.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import llmtrain as lt


@dataclass
class Settings(lt.Settings):
    """The settings of this recipe: those of every recipe, and more. Each section has flags."""

    data: lt.DataConfig
    model: lt.ModelConfig
    lora: lt.LoraConfig
    chat: lt.PairConfig
    preference: lt.PreferenceConfig


DEFAULTS = Settings(
    model=lt.ModelConfig(),
    lora=lt.LoraConfig(),
    data=lt.DataConfig(
        dataset=["builtin:python-preferences"],
        tokenizer=None,
        eval_fraction=0.05,
        global_batch_size=8,
    ),
    chat=lt.PairConfig(),
    preference=lt.PreferenceConfig(),
    # This learning rate is for most losses, and for all weights. Others get their own below.
    optim=lt.OptimConfig(max_steps=100, learning_rate=1e-6, warmup_steps=0.1, weight_decay=0.0),
    run=lt.RunConfig(output_dir="runs/preference"),
)


def tokenized(settings: Settings) -> lt.Tokenized:
    """Tokenise the data set with the model's tokenizer, and write it as rows to disk.

    By default the model is the one that recipes/finetune.py makes.
    """
    settings.default_epochs(1.0)
    has_adapter = settings.lora.lora_r > 0 or settings.model.continue_adapter
    settings.optim.set_default(
        "learning_rate",
        settings.preference.default_learning_rate(has_adapter=has_adapter),
        f"default for {settings.preference.loss_flags}",
    )
    model = settings.model
    if not model.model_name_or_path and not model.from_config:
        if not Path("runs/finetune").is_dir():
            raise lt.UserError(
                "name a model with --model_name_or_path, or make runs/finetune first: python "
                "recipes/finetune.py"
            )
        model.set_default("model_name_or_path", "runs/finetune", "made by recipes/finetune.py")
    return lt.tokenize(
        settings.data,
        chat=settings.chat,
        model=model,
        preference=settings.preference,
    )


def build(settings: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    """Build the model and its preference loss, with a LoRA adapter if the settings have one."""
    return lt.load_model(
        settings.model,
        settings.lora,
        rows,
        seed=settings.optim.seed,
        precision=precision,
        bitwise=settings.parallel.bitwise,
        preference=settings.preference,
    )


def main(argv: list[str] | None = None) -> object:
    """Train the model."""
    settings = lt.parse(DEFAULTS, argv, description=__doc__)
    rows = tokenized(settings)  # before the process group exists
    return lt.fit(settings, rows, build)


if __name__ == "__main__":
    lt.launch(main)
