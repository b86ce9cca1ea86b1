"""Samplers: who reads which row, what happens at the end of the data, and after a resume.

torch's DistributedSampler deals a shuffled list out to the processes: it repeats rows so that the list divides, or
drops some, as many as it takes for this number of processes. llmtrain's sampler is a function of the step: it yields
whole global batches, of which each process takes its share; slots past the end of the data stay empty.
"""

from collections import Counter

import torch
from torch.utils.data import DistributedSampler, TensorDataset

from llmtrain.data.loader import slots_of
from llmtrain.lessons.stage import claim, show

PROCESSES = 1
ROWS, BATCH = 10, 4
STEPS = -(-ROWS // BATCH)


def main() -> None:
    """Show the rows of each step by both samplers, on 1, 2 and 4 processes."""
    show(f"{ROWS} rows, {BATCH} in each global batch")
    for processes in (1, 2, 4):
        show(f"torch on {processes}: {torch_steps(processes)}")
    draws = Counter(row for step in torch_steps(4) for row in step)
    twice = sorted(row for row, count in draws.items() if count > 1)
    dropped = ROWS - sum(map(len, torch_shares(4, drop_last=True)))
    show(
        f"on 4, {draws.total()} rows are drawn, {twice} twice; with drop_last, {dropped} rows are left out"
    )
    assert (len(twice), dropped) == (2, 2)

    ours = our_steps(1)
    for processes in (1, 2, 4):
        show(f"llmtrain on {processes}: {our_steps(processes)}")
        assert our_steps(processes) == ours
    claim(
        "every row is read once",
        sorted(row for step in ours for row in step if row is not None) == [*range(ROWS)],
    )
    show(f"empty slots in the last batch, which weigh nothing: {ours[-1].count(None)}")
    assert ours[-1].count(None) == -ROWS % BATCH

    again = sorted(row for share in torch_shares(2) for row in share[:2])
    show(f"torch, resumed after step 1 by a loop that does not skip: reads {again} again")
    assert set(again) == set(torch_steps(2)[0])
    second = [slot.row for slot in slots_of(1, ROWS, BATCH, seed=0)]
    show(f"llmtrain, asked for step 2: {second}; it skips nothing, as it remembers nothing")
    assert second == ours[1]


def torch_shares(processes: int, drop_last: bool = False) -> list[list[int]]:
    """Return what each process reads in the first epoch."""
    rows = TensorDataset(torch.arange(ROWS))
    return [
        list(DistributedSampler(rows, processes, rank, seed=0, drop_last=drop_last))
        for rank in range(processes)
    ]


def torch_steps(processes: int) -> list[list[int]]:
    """Return the rows of each step, over all processes."""
    shares, each = torch_shares(processes), BATCH // processes
    return [
        [row for share in shares for row in share[step * each :][:each]] for step in range(STEPS)
    ]


def our_steps(processes: int) -> list[list[int | None]]:
    """Return the rows of each step, put together from what each process takes."""
    each = BATCH // processes
    steps = [[slot.row for slot in slots_of(step, ROWS, BATCH, seed=0)] for step in range(STEPS)]
    return [
        [row for rank in range(processes) for row in slots[rank * each :][:each]] for slots in steps
    ]
