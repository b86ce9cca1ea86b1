"""From one machine to many: a launcher on each, and one address where they meet.

Here both launchers run on this machine. Each starts its own processes and gives them ranks of the
group that spans both. The processes compute the same wherever they run.
"""

import socket
import tempfile
from pathlib import Path

from llmtrain.lessons.common import claim, logged, training_run

PROCESSES = 1
STEPS = 8


def main() -> None:
    """Train under two launchers and under one, and compare the losses."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as scratch:
        two_launchers = Path(scratch) / "two"
        one_launcher = Path(scratch) / "one"
        with (
            training_run(two_launchers, STEPS, launcher=_node_options(0, port)),
            training_run(two_launchers, STEPS, launcher=_node_options(1, port)),
        ):
            pass
        with training_run(one_launcher, STEPS):
            pass

        losses = logged(two_launchers, "train/loss")
        expected = logged(one_launcher, "train/loss")

    are_same = len(losses) == STEPS and all(
        abs(loss - expected_loss) < 1e-5
        for (_, loss), (_, expected_loss) in zip(losses, expected, strict=True)
    )
    claim(
        "two launchers with one process each, or one process: the 8 losses are the same to 1e-5",
        are_same,
    )


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _node_options(node_rank: int, port: str) -> tuple[str, ...]:
    """Return the options of one of two launchers, which meet on this machine."""
    options = f"--nnodes 2 --node-rank {node_rank} --master-addr 127.0.0.1 --master-port {port}"
    return tuple(options.split())
