"""Step 3: the same loop, with Accelerate for devices, processes, sharding of batches and precision.

accelerate launch --config_file accelerate_configs/cpu_ddp.yaml docs/migrate/3_accelerate.py
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from task import BATCH, LEARNING_RATE, STEPS, base_model, leave, rows, tell
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

# split_batches: the batch of the loader is the global one, cut among the processes
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), dataloader_config=DataLoaderConfiguration(split_batches=True)
)
with accelerator.main_process_first():
    folder = base_model()
model = AutoModelForCausalLM.from_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
model, optimizer, batches = accelerator.prepare(
    model, optimizer, DataLoader(rows(), batch_size=BATCH)
)

for step, batch in enumerate(batches):
    logits = model(batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    # All processes must call reduce, not only the one that prints.
    mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
    if accelerator.is_main_process:
        tell(step, mean_loss)

assert step + 1 == STEPS
accelerator.wait_for_everyone()
accelerator.end_training()
leave()
