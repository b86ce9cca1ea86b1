"""Who is late: all wait for the slowest, and only the time that each takes for itself tells which it is."""

import time

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import claim, measured, my_rows, prepare, small_gpt, updates
from llmtrain.observe.phases import PHASES, Phases

PROCESSES = 2
SLEEP = 0.05  # seconds, in which rank 1 looks for its data


def main() -> None:
    """Train with a rank that sleeps before each batch, and read the phases of both."""
    accelerator = start_accelerator()
    engine, optimizer = prepare(accelerator, small_gpt())
    phases = Phases(engine.device, engine.model)

    def load(step: int) -> torch.Tensor:
        time.sleep(SLEEP * engine.rank)
        return my_rows(accelerator, 16, step)

    found = []
    for step in updates(engine, phases, optimizer, 13, load):
        if step % 4 == 0:
            readings = engine.gather_numbers(phases.read())
            found.append(phases.late(readings))
            for phase in PHASES if step == 8 else ():
                measured(
                    f"{phase:<10}"
                    + "".join(f"{1000 * seconds:8.1f} ms" for seconds in readings[phase])
                )

    once, late, again = found
    named = late is not None and (late.rank, late.phase) == (1, "data")
    claim("rank 1 is late in data loading in two readings, and is named", named)
    claim("it takes longer by what it slept", late is not None and late.seconds > 0.5 * SLEEP)
    measured(f"late      {late}")
    assert once is again is None
