"""Step 2: the same loop on several processes, by hand.

torchrun --nproc-per-node 2 docs/migrate/2_ddp.py
"""

import os

import torch
import torch.distributed as dist
from task import BATCH, LEARNING_RATE, UPDATES, base_model, leave, rows, tell
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

gpu = torch.cuda.is_available()
dist.init_process_group(
    "nccl" if gpu else "gloo"
)  # where to meet, torchrun has said in the environment
rank, processes = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")

if rank == 0:
    base_model()  # written by one,
dist.barrier()  # and read by all when it is there
model = AutoModelForCausalLM.from_pretrained(base_model()).to(device)
model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
data = rows()
share = BATCH // processes  # of the same global batch: more processes must not make it another run

for step in range(UPDATES):
    batch = data[step * BATCH + rank * share :][:share].to(device)
    logits = model(batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()  # DDP averages the gradients: right here, as all shares have equally many tokens
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    dist.all_reduce(whole)  # or rank 0 would tell the loss of its own rows
    if rank == 0:
        tell(step, whole.item() / processes)

dist.barrier()
dist.destroy_process_group()
leave()
