"""Step 4: the same model and rows in llmtrain's loop: any layout, checkpoints, resuming, metrics.

accelerate launch --config_file accelerate_configs/cpu_ddp.yaml docs/migrate/4_llmtrain.py
"""

from accelerate import PartialState
from datasets import Dataset
from task import BATCH, BLOCK, LEARNING_RATE, STEPS, base_model, rows, tokenizer

import llmtrain as lt

DEFAULTS = lt.Settings(
    data=lt.BatchConfig(global_batch_size=BATCH, per_device_train_batch_size=4),
    optim=lt.OptimConfig(
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta2=0.999,
    ),
    log=lt.LogConfig(logging_steps=5),
    run=lt.RunConfig(output_dir="runs/migrate"),
)


def build(s, rows, precision):
    with PartialState().main_process_first():  # the others find the folder of rank 0
        folder = base_model()
    config = lt.ModelConfig(model_name_or_path=folder, max_length=BLOCK)
    return lt.load_model(
        config,
        None,
        rows,
        seed=s.optim.seed,
        precision=precision,
        bitwise=s.parallel.bitwise,
    )


def main(argv=None):
    s = lt.parse(DEFAULTS, argv, description=__doc__)
    table = Dataset.from_dict({"input_ids": rows().int().numpy()}).with_format("numpy")
    # Your own rows, in the order in which they are stored.
    own = lt.Tokenized.of(table, tokenizer(), in_order=True)
    return lt.fit(s, own, build)


if __name__ == "__main__":
    lt.launch(main)
