"""Who is late: all wait for the slowest rank, and only its own time reveals it."""

import time

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import Training, claim, rank_rows, show_measured, small_gpt
from llmtrain.observe.stragglers import Stragglers

STEPS = 13
SLEEP_SECONDS = 0.05  # by which rank 1 loads its data later


def main() -> None:
    """Train with a rank that sleeps before each batch, and read the phases of both."""
    accelerator = start_accelerator()
    training = Training(accelerator, small_gpt())
    engine = training.engine
    stragglers = Stragglers()

    def load(step: int) -> torch.Tensor:
        time.sleep(SLEEP_SECONDS * engine.ranks.rank)
        return rank_rows(accelerator, 16, step)

    late_ranks = []
    for step in training.steps(STEPS, load):
        if step % 4 != 0:
            continue
        seconds_by_rank = engine.ranks.gather_numbers(engine.phases.read())
        late_ranks.append(stragglers.find_new(seconds_by_rank))
        if step == 8:
            for phase, seconds_of_ranks in seconds_by_rank.items():
                times = "".join(f"{1000 * seconds:8.1f} ms" for seconds in seconds_of_ranks)
                show_measured(f"{phase:<10}{times}")

    # A rank is named when it is late for the second time in a row, and not again after that.
    first, second, third = late_ranks
    is_named = second is not None and (second.rank, second.phase) == (1, "data")
    claim("rank 1 is late in data loading in two log entries, and is named", is_named)
    is_as_late = second is not None and second.seconds > 0.5 * SLEEP_SECONDS
    claim("it is late by about as long as it slept", is_as_late)
    show_measured(f"late      {second}")
    assert first is None
    assert third is None
