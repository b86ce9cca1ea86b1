"""Launching: the same program several times, and how processes find each other.

A launcher (torchrun, accelerate launch) starts N processes of one program. Environment variables
tell each process its rank, and where rank 0 listens. There the processes leave their addresses in a
small store and connect to each other. From then on they are a process group, and can add, gather
and broadcast tensors together.
"""

import os

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import show

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> None:
    """Show the variables that a launcher sets, the store, and two collectives."""
    variables = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
    assert not dist.is_initialized()
    accelerator = start_accelerator()
    for rank, rank_variables in enumerate(gather_object([variables])):
        show(f"the launcher gives process {rank} {rank_variables}")
    assert len(set(gather_object([os.getpid()]))) == 2

    store = dist.distributed_c10d._get_default_store()
    store.set(f"greeting from {dist.get_rank()}", "I am here")
    greeting = store.get(f"greeting from {1 - dist.get_rank()}").decode()  # waits until it is there
    show(f'process 0 reads from the store what process 1 has written: "{greeting}"')

    number = torch.tensor([float(accelerator.process_index + 1)])
    total = accelerator.reduce(number, reduction="sum")
    numbers = accelerator.gather(number).tolist()
    show(f"of 1 and 2, all-reduce gives {total.item():g}, and all-gather gives {numbers}")
    totals = accelerator.gather(total).tolist()
    show(f"both processes have the sum: {totals}")
    assert numbers == [1, 2]
    assert totals == [3, 3]
