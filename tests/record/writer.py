"""Saves one checkpoint after the other until it is killed. Started by test_crashes.py.

    writer.py FOLDER saver|without_commit

``without_commit`` writes each checkpoint under its own name at once.
For each step number read on stdin, the program forks a writer that begins with this step. It prints
``pid PID``, then each step when it is saved, then ``ended``. A kill must lose no printed step.
"""

import os
import shutil
import sys
from pathlib import Path

import torch

from llmtrain.record import saver as saver_module
from llmtrain.record.saver import Saver
from tests.record.checkpoint_files import Files, save_step


def write_with_saver(folder: Path, step: int) -> None:
    saver = Saver(folder, Files(), keep=2)
    while True:
        save_step(saver, step, size=30_000)
        acknowledge(step)
        step += 1


def write_without_commit(folder: Path, step: int) -> None:
    saver_module.temporary_sibling = lambda target: target
    shutil.rmtree = lambda *_, **__: None  # of the temporary name, when the save has ended
    write_with_saver(folder, step)


def acknowledge(step: int) -> None:
    os.write(1, f"{step}\n".encode())


WRITERS = {"saver": write_with_saver, "without_commit": write_without_commit}


def main() -> None:
    folder = Path(sys.argv[1])
    write = WRITERS[sys.argv[2]]
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
