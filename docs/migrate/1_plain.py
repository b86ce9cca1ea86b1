"""Step 1: one device, and the usual loop.

python docs/migrate/1_plain.py
"""

import torch
from task import BATCH, LEARNING_RATE, STEPS, base_model, rows, tell
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(base_model()).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
data = rows()

for step in range(STEPS):
    batch = data[step * BATCH :][:BATCH].to(device)
    logits = model(batch[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    tell(step, loss.item())
