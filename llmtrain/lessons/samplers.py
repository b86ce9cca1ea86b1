"""Samplers: who reads which row, at the end of the data and after a resume.

torch's DistributedSampler deals a shuffled list out to the processes. It repeats rows so that the
list divides, or drops some; how many depends on the number of processes. llmtrain's sampler is a
function of the step. It yields complete global batches, of which each process takes its share. A
slot is a position in the global batch, and slots past the end of the data stay empty.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import DistributedSampler, TensorDataset

from llmtrain.data.order import GlobalBatchSampler
from llmtrain.files import JsonObject
from llmtrain.lessons.common import claim, expect, show

ROWS = 10
BATCH = 4
STEPS = -(-ROWS // BATCH)


def main() -> None:
    """Show the rows of each step by both samplers, on 1, 2 and 4 processes."""
    show(f"{ROWS} rows, {BATCH} in each global batch")
    _show_torch()
    _show_llmtrain()
    _show_resuming()


def _show_torch() -> None:
    for processes in (1, 2, 4):
        show(f"torch on {processes}: {torch_steps(processes)}")

    counts: Counter[int] = Counter()
    for step_rows in torch_steps(4):
        counts.update(step_rows)
    repeated = sorted(row for row, count in counts.items() if count > 1)
    left_out = ROWS - sum(len(share) for share in torch_shares(4, drop_last=True))
    show(
        f"torch on 4 reads {counts.total()} rows, {repeated} twice; with drop_last it leaves out "
        f"{left_out} rows"
    )
    assert len(repeated) == 2
    assert left_out == 2


def _show_llmtrain() -> None:
    for processes in (1, 2, 4):
        show(f"llmtrain on {processes}: {llmtrain_steps(processes)}")
    claim("llmtrain reads every row once", holds=True)
    empty_slots = llmtrain_steps(1)[-1].count(None)
    show(f"empty slots in the last batch, which have no weight: {empty_slots}")


def _show_resuming() -> None:
    first_rows: list[int] = []
    for share in torch_shares(2):
        first_rows += share[:2]
    show(f"torch, resumed after step 1 without skipping, reads {sorted(first_rows)} again")
    assert set(first_rows) == set(torch_steps(2)[0])

    sampler = GlobalBatchSampler(ROWS, BATCH, range(1, STEPS), seed=0)
    second_step = [slot.row for slot in next(iter(sampler))]
    show(f"llmtrain computes the rows of step 2 directly: {second_step}")
    assert second_step == llmtrain_steps(1)[1]


def torch_shares(processes: int, drop_last: bool = False) -> list[list[int]]:
    """Return the rows that each process reads in the first epoch."""
    rows = TensorDataset(torch.arange(ROWS))
    return [
        list(DistributedSampler(rows, processes, rank, seed=0, drop_last=drop_last))
        for rank in range(processes)
    ]


def torch_steps(processes: int) -> list[list[int]]:
    """Return the rows of each step, over all processes."""
    shares = torch_shares(processes)
    rows_per_process = BATCH // processes
    steps = []
    for step in range(STEPS):
        start = step * rows_per_process
        step_rows: list[int] = []
        for share in shares:
            step_rows += share[start : start + rows_per_process]
        steps.append(step_rows)
    return steps


def llmtrain_steps(processes: int) -> list[list[int | None]]:
    """Return the rows of each step, put together from the share of each process."""
    sampler = GlobalBatchSampler(ROWS, BATCH, range(STEPS), seed=0)
    batches = [[slot.row for slot in slots] for slots in sampler]
    order = [row for batch in batches for row in batch if row is not None]
    size = BATCH // processes

    def read(step: int, rank: int) -> list[int | None]:
        return batches[step][rank * size :][:size]

    return read_epoch(read, order, BATCH, processes)


def check(rank_rows: Callable[..., list[int | None]], processes: int, seed: int) -> None:
    """Read epochs of random lengths; see :func:`read_epoch`.

    Args:
        rank_rows: returns a rank's rows of a step, given the order of the epoch, the size of the
            global batch, the number of processes, the number of the step and the rank.
        processes: the number of ranks.
        seed: chooses the orders.
    """
    draw = random.Random(seed)
    for _ in range(5):
        order = draw.sample(range(100), 12 * draw.randint(2, 4) + 1)
        size = processes * draw.randint(2, 3)
        read_epoch(partial(rank_rows, [*order], size, processes), order, size, processes)


def read_epoch(
    read: Callable[[int, int], list[int | None]], order: list[int], batch_size: int, processes: int
) -> list[list[int | None]]:
    """Return the rows of each step, put together from the shares of all ranks, and check them.

    On any number of processes, the global batch of a step has the next rows of the order, each
    once, and empty slots after the last row.

    Args:
        read: returns a rank's rows of a step, given the number of the step and the rank.
        order: the rows in the order of the epoch.
        batch_size: the size of the global batch.
        processes: the number of ranks.
    """
    slots = batch_size // processes
    steps = -(-len(order) // batch_size)
    batches: list[list[int | None]] = [[]] * steps
    for step in [*range(1, steps), 0]:  # a resumed run may begin with any step
        batch: list[int | None] = []
        for rank in range(processes):
            rows = read(step, rank)
            is_share = isinstance(rows, list) and len(rows) == slots and {*rows} <= {None, *order}
            expect(is_share, "share", got=rows, slots=slots)
            batch += rows

        got = Counter(row for row in batch if row is not None)
        expected = Counter(order[step * batch_size : (step + 1) * batch_size])
        details: JsonObject = {"step": step, "read": batch, "expected": [*expected]}
        expect(max(got.values(), default=1) == 1, "repeated", **details)
        expect(not got > expected, "padded", **details)
        expect(not got < expected, "lost", **details)
        expect(got == expected, "layout", **details)
        batches[step] = batch
    return batches
