"""From one machine to many: a launcher on each, and one address where they meet.

Here both launchers run on this machine. Each starts its own processes and gives them ranks of the whole group; what
they compute does not know where they are.
"""

import socket
import tempfile
from pathlib import Path

from llmtrain.launch.children import kill
from llmtrain.lessons.stage import TINY_RUN, begin_recipe, finish, losses_of, show, train_recipe

PROCESSES = 1


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("two", "one")]
        flags = [*TINY_RUN, "--max_steps", "8", "--save_steps", "8"]
        meeting = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
        launchers = []
        try:
            for machine in ("0", "1"):
                words = (*meeting, "--node-rank", machine)
                launchers.append(begin_recipe(1, *flags, "--output_dir", str(folders[0]), launcher_flags=words))
            for launcher in launchers:
                finish(launcher)
        finally:
            for launcher in launchers:
                kill(launcher)
        train_recipe(1, *flags, "--output_dir", str(folders[1]))
        two, one = (losses_of(folder) for folder in folders)
        same = all(abs(a - b) < 1e-5 for a, b in zip(two, one, strict=True))
        show(f"two launchers with one process each, and one process: 8 losses, the same to 1e-5: {same}")
        assert same
        assert len(two) == 8
