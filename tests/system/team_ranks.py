"""Started by test_sharding.py on two ranks, which write checkpoints together.

`team_ranks.py FOLDER` writes FOLDER/rank-0.json and FOLDER/rank-1.json, with the observations of
each rank.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmtrain.errors import UserError
from llmtrain.launching.process import launch
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.parallel.team import Team
from llmtrain.record import checkpoint, tensor_files
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import read_tensors
from tests.record.checkpoint_files import Files

# Shards of equal size, of different sizes, and an empty one.
SHAPES = {"even": (8, 2), "uneven": (7, 5), "vector": (3,), "one row": (1, 4)}


def sharded_tensors(mesh: DeviceMesh, value: float) -> dict[str, torch.Tensor]:
    """Return tensors whose rows are divided among the ranks, and one that all ranks have."""
    tensors = {"count": torch.tensor(value)}
    for name, shape in SHAPES.items():
        tensor = torch.arange(torch.Size(shape).numel()).view(shape) + value
        tensors[name] = distribute_tensor(tensor, mesh, [Shard(0)])
    return tensors


class Rank:
    """One of the two ranks, with a folder that both see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh("cpu", (2,))

    def saver(self, name: str, in_background: bool = False, can_write: bool = True) -> Saver:
        saver = Saver(self.folder / name, Files(), keep=2, in_background=in_background)
        saver.join(Team.with_new_group(), can_write=can_write)
        return saver

    def save(self, saver: Saver, step: int) -> Path:
        weights = sharded_tensors(self.mesh, step)
        moments = FlatState({}, sharded_tensors(self.mesh, step))
        saver.save(step, weights, {"optimizer": moments}, {"step": step})
        return saver.folder / f"step-{step:08d}"

    def is_restored(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint has no fault, and fills this rank's shards as saved."""
        expected = sharded_tensors(self.mesh, step)
        for part in ("model", "optimizer"):
            tensors = sharded_tensors(self.mesh, 0.0)
            fill(tensors, read_tensors(path / part))
            for name, tensor in tensors.items():
                if not torch.equal(local_shard(tensor), local_shard(expected[name])):
                    return False
        return checkpoint.find_fault(path) is None

    def tensor_files(self, name: str) -> list[str]:
        paths = (self.folder / name).rglob("*.safetensors")
        return sorted(str(path.relative_to(self.folder / name)) for path in paths)

    def observe_saves(self) -> dict[str, Any]:
        saver = self.saver("checkpoints")
        path = self.save(saver, 1)
        observations: dict[str, Any] = {
            "is restored": self.is_restored(path, 1),
            "files": self.tensor_files("checkpoints"),
        }

        background_saver = self.saver("checkpoints", in_background=True)
        path = self.save(background_saver, 2)
        background_saver.wait()
        dist.barrier()  # the main process moves the checkpoint to its place
        observations["is restored after a save in the background"] = self.is_restored(path, 2)

        observations["error of a full disk"] = self.error_of_a_full_disk(saver)
        dist.barrier()  # the main process removes the incomplete checkpoint
        folders = (self.folder / "checkpoints").iterdir()
        observations["checkpoints after a full disk"] = sorted(path.name for path in folders)
        dist.barrier()
        return observations

    def error_of_a_full_disk(self, saver: Saver) -> str:
        """Save while the disk of rank 1 is full, and return the error that this rank gets."""
        write_hashed: Any = tensor_files.write_hashed

        def fail_on_rank_1(path: Path, pieces: Iterator[Any]) -> Any:
            if self.rank == 1 and "optimizer" in str(path):
                next(pieces)
                raise OSError(28, "No space left on device", str(path))
            return write_hashed(path, pieces)

        tensor_files.write_hashed = fail_on_rank_1
        try:
            self.save(saver, 3)
        except UserError as error:
            return str(error)
        finally:
            tensor_files.write_hashed = write_hashed
        return "no error"

    def observe_single_writer(self) -> dict[str, Any]:
        """Save while only rank 0 sees the folder."""
        saver = self.saver("one-disk", can_write=self.rank == 0)
        path = self.save(saver, 4)
        return {
            "is restored from one disk": self.is_restored(path, 4),
            "files on one disk": self.tensor_files("one-disk"),
        }

    def observe_bug_on_rank_1(self) -> dict[str, str]:
        """Return the error that this rank gets, and the innermost function of its traceback."""

        def fail_on_rank_1() -> None:
            if self.rank == 1:
                raise ValueError("bad number")

        try:
            Team.everyone().on_all(fail_on_rank_1)
        except Exception as error:
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error}"
            return {"error of a bug": message, "raised in": innermost.name}
        return {"error of a bug": "no error"}


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    rank = Rank(folder)
    observations = {
        **rank.observe_saves(),
        **rank.observe_single_writer(),
        **rank.observe_bug_on_rank_1(),
    }
    (folder / f"rank-{rank.rank}.json").write_text(json.dumps(observations))


if __name__ == "__main__":
    launch(main)
