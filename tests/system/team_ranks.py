"""Started by test_sharding.py on two ranks: write checkpoints together, and check them on each rank.

`team_ranks.py FOLDER`
"""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmtrain.errors import UserError
from llmtrain.launching.process import launch
from llmtrain.parallel.ranks import Team
from llmtrain.parallel.shards import fill, local_shard
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
        self.team = Team(self.rank, dist.group.WORLD)
        self.mesh = init_device_mesh("cpu", (2,))

    def saver(self, name: str, in_background: bool = False, can_write: bool = True) -> Saver:
        saver = Saver(self.folder / name, Files(), keep=2, in_background=in_background)
        saver.join(self.team.with_new_group(), can_write=can_write)
        return saver

    def save(self, saver: Saver, step: int) -> Path:
        weights = sharded_tensors(self.mesh, step)
        moments = FlatState({}, sharded_tensors(self.mesh, step))
        saver.save(step, weights, {"optimizer": moments}, {"step": step})
        return saver.folder / f"step-{step:08d}"

    def assert_restored(self, path: Path, step: int) -> None:
        """Assert that a checkpoint has no fault, and fills this rank's shards as saved."""
        expected = sharded_tensors(self.mesh, step)
        for part in ("model", "optimizer"):
            tensors = sharded_tensors(self.mesh, 0.0)
            fill(tensors, read_tensors(path / part))
            for name, tensor in tensors.items():
                assert torch.equal(local_shard(tensor), local_shard(expected[name])), name
        assert checkpoint.find_fault(path) is None

    def tensor_files(self, name: str) -> list[str]:
        paths = (self.folder / name).rglob("*.safetensors")
        return sorted(str(path.relative_to(self.folder / name)) for path in paths)

    def check_that_each_rank_writes_its_shards(self) -> None:
        path = self.save(self.saver("checkpoints"), 1)
        self.assert_restored(path, 1)
        assert self.tensor_files("checkpoints") == [
            "step-00000001/model/model-00001-of-00002.safetensors",
            "step-00000001/model/model-00002-of-00002.safetensors",
            "step-00000001/optimizer/state-00001-of-00002.safetensors",
            "step-00000001/optimizer/state-00002-of-00002.safetensors",
        ]

    def check_save_in_the_background(self) -> None:
        saver = self.saver("checkpoints", in_background=True)
        path = self.save(saver, 2)
        saver.wait()
        dist.barrier()  # the main process moves the checkpoint to its place
        self.assert_restored(path, 2)

    def check_full_disk_of_rank_1(self) -> None:
        """The error comes on both ranks, and the checkpoints of before stay."""
        write_hashed: Any = tensor_files.write_hashed

        def fail_on_rank_1(path: Path, pieces: Iterator[Any]) -> Any:
            if self.rank == 1 and "optimizer" in str(path):
                next(pieces)
                raise OSError(28, "No space left on device", str(path))
            return write_hashed(path, pieces)

        saver = self.saver("checkpoints")
        tensor_files.write_hashed = fail_on_rank_1
        with pytest.raises(UserError, match=r"No space left on device.*older .* are untouched"):
            self.save(saver, 3)
        tensor_files.write_hashed = write_hashed
        dist.barrier()  # the main process removes the incomplete checkpoint
        folders = (self.folder / "checkpoints").iterdir()
        assert sorted(path.name for path in folders) == ["step-00000001", "step-00000002"]
        dist.barrier()

    def check_that_a_rank_without_the_folder_sends_its_shards(self) -> None:
        saver = self.saver("one-disk", can_write=self.rank == 0)
        path = self.save(saver, 4)
        self.assert_restored(path, 4)
        assert self.tensor_files("one-disk") == [
            "step-00000004/model/model.safetensors",
            "step-00000004/optimizer/state.safetensors",
        ]

    def check_bug_on_rank_1(self) -> None:
        """Both ranks end, and rank 1 keeps its traceback."""

        def fail_on_rank_1() -> None:
            if self.rank == 1:
                raise ValueError("bad number")

        with pytest.raises(Exception, match="bad number") as raised:
            self.team.on_all(fail_on_rank_1)
        if self.rank == 1:
            assert raised.type is ValueError
            assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "fail_on_rank_1"
        else:
            assert raised.typename == "FailedElsewhereError"
            assert str(raised.value).startswith("rank 1 has failed: ValueError: bad number")


def main() -> None:
    dist.init_process_group("gloo")
    rank = Rank(Path(sys.argv[1]))
    rank.check_that_each_rank_writes_its_shards()
    rank.check_save_in_the_background()
    rank.check_full_disk_of_rank_1()
    rank.check_that_a_rank_without_the_folder_sends_its_shards()
    rank.check_bug_on_rank_1()


if __name__ == "__main__":
    launch(main)
