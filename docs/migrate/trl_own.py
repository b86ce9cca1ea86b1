"""Five extensions of TRL's SFTTrainer: a loss, two learning rates, a schedule, a callback, a metric.

python docs/migrate/trl_own.py
"""

import math
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from task import BATCH, base_model, rows_with_labels, tokenizer
from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import SFTConfig, SFTTrainer, TrlParser


@dataclass
class Arguments(SFTConfig):
    z_loss: float = field(default=1e-3, metadata={"help": "weight of the z-loss"})
    embedding_rate: float = field(default=1e-2, metadata={"help": "learning rate of embeddings"})


class Trainer(SFTTrainer):
    loss_is_scaled_for_ga = True  # compute_loss divides by the targets of all micro-batches

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        targets = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].float()
        is_target = targets != -100
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        penalty = (logits.logsumexp(-1).square() * is_target).sum()
        loss = nll + self.args.z_loss * penalty

        if num_items_in_batch is None:  # in an evaluation
            loss = loss / is_target.sum()
        else:  # DDP takes the mean over the processes
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            embeddings, others = [], []
            for name, parameter in (model or self.model).named_parameters():
                (embeddings if "wte" in name or "wpe" in name else others).append(parameter)
            self.optimizer = torch.optim.AdamW(
                [{"params": embeddings, "lr": self.args.embedding_rate}, {"params": others}],
                lr=self.args.learning_rate,
                weight_decay=0.0,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        def share(step):
            return min((step + 1) / 3, math.sqrt(1 - step / num_training_steps))

        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)
        return self.lr_scheduler


class Spikes(TrainerCallback, ExportableState):
    """Ends the run after several steps whose loss is far above its moving average."""

    def __init__(self, limit):
        self.limit = limit
        self.average = None
        self.count = 0

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" not in logs:
            return
        if self.average is None:
            self.average = logs["loss"]
        self.count += logs["loss"] > 1.5 * self.average
        self.average = 0.9 * self.average + 0.1 * logs["loss"]
        if self.count >= self.limit:
            control.should_training_stop = True

    def state(self):
        return {
            "args": {"limit": self.limit},
            "attributes": {"average": self.average, "count": self.count},
        }


def likeliest(logits, labels):
    return logits.argmax(-1)


def accuracy(prediction):
    targets = prediction.label_ids[:, 1:]
    is_right = prediction.predictions[:, :-1] == targets
    return {"accuracy": is_right.sum() / (targets != -100).sum()}


def make_trainer(argv, callbacks):
    parser = TrlParser(Arguments)
    parser.set_defaults_with_config(
        output_dir="runs/trl-own",
        max_steps=18,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=BATCH // 4,
        learning_rate=1e-3,
        train_sampling_strategy="sequential",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        per_device_eval_batch_size=32,
        save_steps=6,
        restore_callback_states_from_checkpoint=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
    )
    (arguments,) = parser.parse_args_and_config(argv)

    table = Dataset.from_dict(rows_with_labels())
    words = tokenizer()
    words.pad_token = "!"  # which a trainer must have; these rows need no padding
    return Trainer(
        model=base_model(),
        args=arguments,
        train_dataset=table.select(range(288)),
        eval_dataset=table.select(range(288, 320)),
        processing_class=words,
        callbacks=callbacks,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=likeliest,
    )


def main(argv=None):
    trainer = make_trainer(argv, callbacks=[Spikes(limit=3)])
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
