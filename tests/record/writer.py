"""Save checkpoint after checkpoint until killed, by test_crashes.py: `writer.py FOLDER FIRST_STEP [plain]`.

Each step is said on stdout once it is saved, which is the promise that a kill may not break. With `plain`,
accelerate's own `save_state` writes them.
"""

import os
import sys
from pathlib import Path

import torch

from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from tests.record.test_checkpoint import Files


def ours(folder: Path, step: int) -> None:
    saver = Saver(folder, Files(), keep=2)
    while True:
        weights = {"w": torch.full((30_000,), float(step))}
        saver.save(
            step,
            weights,
            {"optimizer": FlatState({}, {"w.exp_avg": weights["w"] * 2})},
            {"step": step},
        )
        acknowledge(step)
        step += 1


def plain(folder: Path, step: int) -> None:
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


def child_of(folder: Path, step: int, how: str) -> None:
    {"ours": ours, "plain": plain}[how](folder, step)


def main() -> None:
    """Fork a writer for each line `STEP` read on stdin, say its process id, go on at its end."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "plain":
        import accelerate  # noqa: F401 - once, before forking
    torch.set_num_threads(1)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            child_of(folder, int(line), how)
        print(f"pid {process}", flush=True)
        os.waitpid(process, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
