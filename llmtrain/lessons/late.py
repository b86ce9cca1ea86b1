"""Who is late: all wait for the slowest, and only the time that each takes for itself tells which it is."""

import time
from collections.abc import Iterator

import torch

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import measured, rows, show, small_gpt, train_in_phases
from llmtrain.observe.phases import PHASES, Phases
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 2
SLEEP = 0.05  # seconds, in which process 1 looks for its data


def main() -> None:
    accelerator = start_accelerator()
    rank, plain = accelerator.process_index, small_gpt()
    model, optimizer = accelerator.prepare(plain, make_optimizer(plain, OptimConfig(optim="adamw")))
    phases = Phases(accelerator, model)
    named = []

    def slow_rows() -> Iterator[torch.Tensor]:
        for step in range(13):
            time.sleep(SLEEP * rank)
            yield rows(16, step)[8 * rank :][:8]

    def read(step: int) -> None:
        if step % 4 == 0:
            readings = phases.read()
            named.append(phases.late(readings))
            if step == 8:
                for phase in PHASES:
                    measured(f"{phase:<10}" + "".join(f"{1000 * seconds:8.1f} ms" for seconds in readings[phase]))

    train_in_phases(accelerator, model, optimizer, phases, slow_rows(), read)
    once, late, again = named
    assert late is not None
    show(f"twice in a row the same, so it is named: rank {late.rank}, in {PHASES[late.phase]}")
    show(f"it takes longer by what it slept: {late.seconds > 0.9 * SLEEP}")
    measured(f"late      {late}")
    assert (late.rank, late.phase) == (1, "data")
    assert late.seconds > 0.9 * SLEEP
    assert once is None
    assert again is None
