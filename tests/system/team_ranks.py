"""Run on two ranks by test_sharding.py: processes that write a checkpoint together, and what becomes of it when one of
them cannot. `team_ranks.py FOLDER` writes what was seen.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmtrain.errors import UserError
from llmtrain.launching.process import launch
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.parallel.team import Team
from llmtrain.record import checkpoint, tensor_files
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors
from tests.record.test_checkpoint import Files

SHAPES = {
    "wide": (7, 5),
    "narrow": (3,),
    "one": (1, 4),
    "even": (8, 2),
}  # also parts that are uneven, or empty


def spread(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    whole = {
        name: torch.arange(torch.Size(shape).numel()).view(shape) + value
        for name, shape in SHAPES.items()
    }
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    return {**parts, "count": torch.tensor(value)}  # which all hold


def gives_back(path: Path, value: float) -> bool:
    target = spread(0.0)
    for part in ("model", "optimizer"):
        fill(target, read_tensors(path / part))
        if not all(
            torch.equal(local_shard(tensor), local_shard(spread(value)[name]))
            for name, tensor in target.items()
        ):
            return False
    return checkpoint.find_fault(path) is None


def refused(action: Callable[[], None]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "not refused"


def seen_of_bug_on_rank_1(team: Team) -> list[str]:
    """Return the error that this rank gets, and the innermost function of its traceback."""

    def action() -> None:
        if team.rank == 1:
            raise ValueError("bad number")

    try:
        team.on_all(action)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [f"{type(error).__name__}: {error}", frames[-1].name]
    return []


def main() -> None:
    dist.init_process_group("gloo")
    rank, root = dist.get_rank(), Path(sys.argv[1])
    team, found = Team.with_new_group(), {}
    saver = Saver(root / "checkpoints", Files(), keep=2)
    saver.join(team, can_write=True)

    def save(saver: Saver, step: int) -> Path:
        saver.save(
            step,
            spread(step),
            {"optimizer": FlatState({}, spread(step))},
            {"step": step},
        )
        return saver.folder / f"step-{step:08d}"

    found["gives back"] = gives_back(save(saver, 1), 1.0)
    found["files"] = sorted(
        str(path.relative_to(root)) for path in (root / "checkpoints").rglob("*.safetensors")
    )
    background = Saver(root / "checkpoints", Files(), keep=2, in_background=True)
    background.join(team, can_write=True)
    path = save(background, 2)
    background.wait()
    dist.barrier()  # the main process commits
    found["in the background"] = gives_back(path, 2.0)

    original: Any = tensor_files.write_hashed

    def full(path: Path, pieces: Any) -> Any:
        if rank == 1 and "optimizer" in str(path):
            next(pieces)
            raise OSError(28, "No space left on device", str(path))
        return original(path, pieces)

    tensor_files.write_hashed = full
    found["full"] = refused(lambda: save(saver, 3))
    tensor_files.write_hashed = original
    dist.barrier()  # the main process cleans up
    found["left"] = sorted(path.name for path in (root / "checkpoints").iterdir())
    dist.barrier()
    alone = Saver(root / "elsewhere", Files(), keep=2)
    alone.join(Team.with_new_group(), can_write=rank == 0)
    found["one disk"] = gives_back(save(alone, 4), 4.0)
    found["files on one disk"] = sorted(
        path.name for path in (root / "elsewhere").rglob("*.safetensors")
    )
    found["bug"] = seen_of_bug_on_rank_1(Team.everyone())
    (root / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
