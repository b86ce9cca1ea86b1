"""Launching: the same program several times, and how the processes find each other.

A launcher (torchrun, accelerate launch) starts N processes of one program and tells each, in its environment, which of
them it is and where the first one listens. There they leave their addresses in a small store, connect to each other,
and are a process group: from then on they can add, gather and broadcast tensors together.
"""

import os

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import show

PROCESSES = 2


def main() -> None:
    told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert not dist.is_initialized()
    accelerator = start_accelerator()
    for rank, theirs in enumerate(gather_object([told])):
        show(f"process {rank} was told " + ", ".join(f"{name}={value}" for name, value in theirs.items()))
    assert len(set(gather_object([os.getpid()]))) == 2

    store = dist.distributed_c10d._get_default_store()
    store.set(f"greeting from {dist.get_rank()}", "I am here")
    other = 1 - dist.get_rank()
    heard = store.get(f"greeting from {other}").decode()  # waits until it is there
    show(f'process 0 reads in the store what process 1 has left there: "{heard}"')

    mine = torch.tensor([float(accelerator.process_index + 1)])
    total, everyone = accelerator.reduce(mine, reduction="sum"), accelerator.gather(mine)
    show(f"each brings its number, 1 and 2: the sum is {total.item():g} and all of them are {everyone.tolist()}")
    assert total.item() == 3
    assert everyone.tolist() == [1, 2]
    here = accelerator.gather(total)
    show(f"both hold the sum: {here.tolist()}")
    assert here.tolist() == [3, 3]
