"""Samplers: who reads which row, what happens at the end of the data, and after a resume.

torch's DistributedSampler deals a shuffled list out to the processes: it repeats rows so that the list divides, or
drops some, as many as it takes for this number of processes. llmtrain's sampler is a function of the step: it yields
whole global batches, of which each process takes its part; slots past the end of the data stay empty.
"""

from collections import Counter

import torch
from torch.utils.data import DistributedSampler, TensorDataset

from llmtrain.data.loader import slots_of
from llmtrain.lessons.stage import show

PROCESSES = 1
ROWS, BATCH = 10, 4


def main() -> None:
    show(f"{ROWS} rows, {BATCH} in each global batch")
    for processes in (1, 2, 4):
        show(f"torch, {processes} process{'es' * (processes > 1)}: {torch_steps(processes)}")
    seen = {n: [set(step) for step in torch_steps(n)] for n in (1, 2, 4)}
    assert not seen[1] == seen[2] == seen[4]
    draws = Counter(row for step in torch_steps(4) for row in step)
    twice = sorted(row for row, count in draws.items() if count > 1)
    show(
        f"on 4 processes {sum(draws.values())} rows are drawn; twice: {twice}; with drop_last {dropped(4)} are left out"
    )
    assert len(twice) == 2
    assert dropped(4) == 2

    for processes in (1, 2, 4):
        show(f"llmtrain, {processes} process{'es' * (processes > 1)}: {our_steps(processes)}")
        assert our_steps(processes) == our_steps(1)
    drawn = [row for step in our_steps(1) for row in step if row is not None]
    once, empty = sorted(drawn) == list(range(ROWS)), our_steps(1)[-1].count(None)
    show(f"every row once: {once}; empty slots, which weigh nothing, in the last batch: {empty}")
    assert once
    assert empty == -ROWS % BATCH

    resumed = [row for process in torch_shares(2) for row in process[:2]]
    show(f"torch, resumed after 1 step by someone who does not skip: reads {sorted(resumed)} again")
    assert set(resumed) == set(torch_steps(2)[0])
    again = [slot.row for slot in slots_of(1, ROWS, BATCH, seed=0)]
    show(f"llmtrain, asked for step 2 at once: {again}; nothing is skipped, for nothing is remembered")
    assert again == our_steps(1)[1]


def torch_shares(processes: int, drop_last: bool = False) -> list[list[int]]:
    """What each process reads in the first epoch."""
    rows = TensorDataset(torch.arange(ROWS))
    return [list(DistributedSampler(rows, processes, rank, seed=0, drop_last=drop_last)) for rank in range(processes)]


def torch_steps(processes: int) -> list[list[int]]:
    """The rows of each step, over all processes."""
    shares, each = torch_shares(processes), BATCH // processes
    steps = -(-len(shares[0]) // each)
    return [[row for share in shares for row in share[step * each :][:each]] for step in range(steps)]


def dropped(processes: int) -> int:
    return ROWS - sum(len(share) for share in torch_shares(processes, drop_last=True))


def our_steps(processes: int) -> list[list[int | None]]:
    """The rows of each step, put together from what each process takes."""
    each = BATCH // processes
    steps = []
    for step in range(-(-ROWS // BATCH)):
        slots = [slot.row for slot in slots_of(step, ROWS, BATCH, seed=0)]
        steps.append([row for rank in range(processes) for row in slots[rank * each :][:each]])
    return steps
