"""GRPO with TRL, on a model that llmtrain has fine-tuned.

python docs/migrate/trl_grpo.py --model runs/finetune/model --output_dir runs/grpo
"""

from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}


@dataclass
class Arguments:
    model: str = field(default="runs/finetune/model", metadata={"help": "folder of the model"})


def short_and_right(completions, capital, **columns):
    """Reward an answer that names the capital, and a little more if it is short."""
    rewards = []
    for (answer,), name in zip(completions, capital, strict=True):
        text = answer["content"]
        rewards.append(float(name in text) - len(text) / 1000)
    return rewards


def questions():
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
                "capital": capital,
            }
            for country, capital in CAPITALS.items()
        ]
    )


def make_trainer(argv=None):
    parser = TrlParser([Arguments, GRPOConfig])
    parser.set_defaults_with_config(
        output_dir="runs/grpo",
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=32,
        learning_rate=1e-6,
        logging_steps=1,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
    )
    arguments, config = parser.parse_args_and_config(argv)
    return GRPOTrainer(
        model=arguments.model,
        reward_funcs=short_and_right,
        train_dataset=questions(),
        args=config,
    )


def main(argv=None):
    trainer = make_trainer(argv)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
