"""Launching: the same program several times, and how the processes find each other.

A launcher (torchrun, accelerate launch) starts N processes of one program and tells each, in its environment, which of
them it is and where the first one listens. There they leave their addresses in a small store, connect to each other,
and are a process group: from then on they can add, gather and broadcast tensors together.
"""

import os

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import show

PROCESSES = 2


def main() -> None:
    """Show what a launcher tells its processes, their store, and two collectives."""
    told = ", ".join(
        f"{name}={os.environ[name]}"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    assert not dist.is_initialized()
    accelerator = start_accelerator()
    for rank, words in enumerate(gather_object([told])):
        show(f"process {rank} was told {words}")
    assert len(set(gather_object([os.getpid()]))) == 2

    store = dist.distributed_c10d._get_default_store()
    store.set(f"greeting from {dist.get_rank()}", "I am here")
    heard = store.get(f"greeting from {1 - dist.get_rank()}").decode()  # waits until it is there
    show(f'process 0 reads in the store what process 1 has left there: "{heard}"')

    mine = torch.tensor([float(accelerator.process_index + 1)])
    total, everyone = accelerator.reduce(mine, reduction="sum"), accelerator.gather(mine)
    show(
        f"each brings its number, 1 and 2: the sum is {total.item():g} and all of them are {everyone.tolist()}"
    )
    sums = accelerator.gather(total).tolist()
    show(f"both hold the sum: {sums}")
    assert (everyone.tolist(), sums) == ([1, 2], [3, 3])
