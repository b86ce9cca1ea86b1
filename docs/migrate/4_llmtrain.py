"""Step 4: the same model and rows in llmtrain's loop: any layout, checkpoints, resumes, metrics, one line for an error.

accelerate launch --config_file accelerate_configs/cpu_ddp.yaml docs/migrate/4_llmtrain.py
"""

from dataclasses import asdict

from datasets import Dataset
from task import BATCH, BLOCK, LEARNING_RATE, UPDATES, base_model, rows, tokenizer

from llmtrain import (
    DataConfig,
    DDPConfig,
    Layout,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    launch,
    leave_group,
    load_model,
    make_optimizer,
    open_run,
    parse,
    resolved,
    start_accelerator,
    train,
    train_loader,
)

DEFAULTS = (
    DataConfig(global_batch_size=BATCH, per_device_train_batch_size=4),
    OptimConfig(
        max_steps=UPDATES,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta2=0.999,
    ),
    DDPConfig(),
    RunConfig(output_dir="runs/migrate", logging_steps=5),
)


def main() -> None:
    data, optim, ddp, run = parse(*DEFAULTS, description=__doc__)
    table = Dataset.from_dict({"input_ids": rows().int().numpy()}).with_format("numpy")

    accelerator = start_accelerator(ddp, run.bitwise)
    with accelerator.main_process_first():
        folder = base_model()
    layout = Layout.of(data, accelerator.num_processes, run.bitwise)
    where = ModelConfig(model_name_or_path=folder, block_size=BLOCK)
    model, files, start = load_model(where, LoraConfig(), tokenizer(), accelerator, run.seed)
    identity = {
        "start": start,
        "rows": "the language reference",
        "batch": data.global_batch_size,
        "update": asdict(optim),
    }
    with open_run(accelerator, run, identity, files, resolved(data, optim, ddp, run)) as record:
        steps = range(record.step, optim.max_steps)
        batches = train_loader(
            table, data.global_batch_size, layout.micro_batch, steps, seed=None
        )  # as they are stored
        optimizer = make_optimizer(model, optim, accelerator.mixed_precision)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        record.restore(model, optimizer)
        train(accelerator, model, optimizer, batches, None, optim, run, record)
    leave_group()


if __name__ == "__main__":
    launch(main)
