"""Step 2: the same loop on several processes, by hand.

torchrun --nproc-per-node 2 docs/migrate/2_ddp.py
"""

import os

import torch
import torch.distributed as dist
from task import BATCH, LEARNING_RATE, STEPS, base_model, leave, rows, tell
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

gpu = torch.cuda.is_available()
# torchrun sets the environment variables that say where the processes meet.
dist.init_process_group("nccl" if gpu else "gloo")
rank, processes = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")

if rank == 0:
    base_model()  # one process writes it
dist.barrier()  # and the others wait until it exists
model = AutoModelForCausalLM.from_pretrained(base_model()).to(device)
model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
data = rows()
# Each process reads a share of the same global batch, so the run does not depend on their number.
share = BATCH // processes

for step in range(STEPS):
    batch = data[step * BATCH + rank * share :][:share].to(device)
    logits = model(batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    # DDP averages the gradients. That is correct here because all shares have equally many tokens.
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss_sum = loss.detach().clone()
    dist.all_reduce(loss_sum)  # otherwise rank 0 would print the loss of its own rows
    if rank == 0:
        tell(step, loss_sum.item() / processes)

dist.barrier()
dist.destroy_process_group()
leave()
