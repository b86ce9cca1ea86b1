"""From one machine to many: a launcher on each, and one address where they meet.

Here both launchers run on this machine. Each starts its own processes and gives them ranks of the whole group; what
they compute does not know where they are.
"""

import socket
import tempfile
from pathlib import Path

from llmtrain.lessons.stage import claim, training
from llmtrain.record.history import read_lines

PROCESSES = 1


def main() -> None:
    """Train under two launchers and under one, and compare the losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as scratch:
        two, one = folders = Path(scratch) / "two", Path(scratch) / "one"
        meeting = (
            "--nnodes",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            "--node-rank",
        )
        with training(two, 8, launcher=(*meeting, "0")), training(two, 8, launcher=(*meeting, "1")):
            pass
        with training(one, 8):
            pass
        read = [read_lines(folder / "metrics.jsonl") for folder in folders]
        losses = [[line["train/loss"] for line in lines if "train/loss" in line] for lines in read]
        same = len(losses[0]) == 8 and all(abs(a - b) < 1e-5 for a, b in zip(*losses, strict=True))
        claim(
            "two launchers with one process each, and one process: 8 losses, the same to 1e-5", same
        )
