"""Saves one checkpoint after the other until it is killed. Started by test_crashes.py.

    writer.py FOLDER saver|save_state

``saver`` writes the checkpoints of llmtrain, ``save_state`` those of ``accelerator.save_state``.
For each step number read on stdin, the program forks a writer that begins with this step. It prints
``pid PID``, then each step when it is saved, then ``ended``. A kill must lose no printed step.
"""

import os
import sys
from pathlib import Path

import torch

from llmtrain.record.saver import Saver
from tests.record.checkpoint_files import Files, save_step


def write_with_saver(folder: Path, step: int) -> None:
    saver = Saver(folder, Files(), keep=2)
    while True:
        save_step(saver, step, size=30_000)
        acknowledge(step)
        step += 1


def write_with_save_state(folder: Path, step: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=2, iteration=step
    )
    accelerator = Accelerator(cpu=True, project_config=settings)
    model = accelerator.prepare(torch.nn.Linear(200, 150))
    while True:
        with torch.no_grad():
            model.weight.fill_(step)
        accelerator.save_state()
        acknowledge(step)
        step += 1


def acknowledge(step: int) -> None:
    os.write(1, f"{step}\n".encode())


WRITERS = {"saver": write_with_saver, "save_state": write_with_save_state}


def main() -> None:
    folder = Path(sys.argv[1])
    write = WRITERS[sys.argv[2]]
    if write is write_with_save_state:
        import accelerate  # noqa: F401 - imported once, before forking
    torch.set_num_threads(1)

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            write(folder, int(line))
        print(f"pid {process}", flush=True)
        os.waitpid(process, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
