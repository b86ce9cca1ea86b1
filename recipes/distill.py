# /// script
# requires-python = ">=3.11"
# dependencies = ["llmtrain[lora]"]
# ///
"""Distill a teacher into a student: train one causal language model to predict as another does.

accelerate launch recipes/distill.py --model_name_or_path A --teacher_model_name_or_path B
"""

from __future__ import annotations

from dataclasses import dataclass

import llmtrain as lt


@dataclass
class Settings(lt.Settings):
    """The settings of this recipe: those of every recipe, and more. Each section has flags."""

    data: lt.DataConfig
    model: lt.ModelConfig
    lora: lt.LoraConfig
    chat: lt.ChatConfig
    distill: lt.DistillConfig


DEFAULTS = Settings(
    model=lt.ModelConfig(from_config="llama"),
    lora=lt.LoraConfig(),
    data=lt.DataConfig(
        dataset=["builtin:python-functions"],
        tokenizer=None,
        eval_fraction=0.02,
        global_batch_size=8,
    ),
    chat=lt.ChatConfig(),
    distill=lt.DistillConfig(),
    # This learning rate is for random weights. Trained ones get another default below.
    optim=lt.OptimConfig(max_steps=240, learning_rate=1e-2, warmup_steps=0.1, weight_decay=0.01),
    run=lt.RunConfig(output_dir="runs/distill"),
)


def tokenized(settings: Settings) -> lt.Tokenized:
    """Tokenise the data set with the model's tokenizer, and pack it into rows on disk."""
    if settings.model.model_name_or_path:
        rate = 2e-4 if settings.lora.lora_r or settings.model.continue_adapter else 2e-5
        settings.optim.set_default("learning_rate", rate, "default for a pretrained model")
    settings.default_epochs(3.0)
    return lt.tokenize(
        settings.data, chat=settings.chat, model=settings.model, distill=settings.distill
    )


def build(settings: Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
    """Build the student, with a LoRA adapter if the settings have one, and its teacher."""
    student = lt.load_model(
        settings.model,
        settings.lora,
        rows,
        seed=settings.optim.seed,
        precision=precision,
        bitwise=settings.parallel.bitwise,
    )
    return lt.with_teacher(student, settings.distill, settings.model, rows, settings.optim.seed)


def main(argv: list[str] | None = None) -> object:
    """Train the model."""
    settings = lt.parse(DEFAULTS, argv, description=__doc__)
    rows = tokenized(settings)  # before the process group exists
    return lt.fit(settings, rows, build)


if __name__ == "__main__":
    lt.launch(main)
