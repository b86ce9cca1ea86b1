"""Checkpoints of one run, one after the other: at once, or from a copy in the background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import meta_like
from llmtrain.parallel.team import ALONE, Team
from llmtrain.record.checkpoint import prune, write_checkpoint
from llmtrain.record.tensors import Share
from llmtrain.types import Facts, ModelWriter


class Saver:
    """Writes checkpoints of a run into its folder and deletes old ones; used by the ranks of a team, together.

    In the background there is one save at a time; an error there is raised by the next :meth:`wait`.
    """

    def __init__(
        self,
        folder: Path,
        files: ModelWriter,
        keep: int,
        in_background: bool = False,
        team: Team = ALONE,
    ) -> None:
        self.folder, self.files, self.keep, self.team = folder, files, keep, team
        self.verified: list[Path] = []  # what this process has written, or read whole
        self.longest_seconds = 0.0  # that a checkpoint took to be written
        self._pool = ThreadPoolExecutor(1, "saving") if in_background else None
        self._under_way: Future[None] | None = None
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def failed(self) -> bool:
        """A save in the background has ended with an error, which :meth:`wait` will raise."""
        pending = self._under_way
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self,
        step: int,
        weights: DistributedTensors,
        optimizer: DistributedTensors,
        state: Facts,
        done: Callable[[], None],
    ) -> None:
        """Commit a checkpoint of the tensors as they are now, then call ``done``."""
        self.wait()
        shares = Share(weights, self.team, self.files.divisible), Share(optimizer, self.team)
        if self._pool is None:
            self._write(step, *shares, state, done)
        else:
            copies = self._copy("weights", shares[0]), self._copy("optimizer", shares[1])
            self._under_way = self._pool.submit(self._write, step, *copies, state, done)

    def wait(self) -> None:
        """Wait until no save is under way. Raises the error of the last one."""
        pending, self._under_way = self._under_way, None
        if pending is not None:
            pending.result()

    def _copy(self, part: str, share: Share) -> Share:
        """Return a copy on the host of what this rank writes; of what others write the shapes stay.

        Its memory is kept from save to save: new pages cost more than the copying.
        """
        copies = {name: meta_like(tensor) for name, tensor in share.source.tensors.items()}
        for name, tensor in share.wholes():
            key = part, name
            if key not in self._copies:
                self._copies[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            copies[name] = self._copies[key].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in share.source.tensors.values()):
            torch.cuda.synchronize()
        return share._replace(source=DistributedTensors(copies))

    def _write(
        self, step: int, weights: Share, optimizer: Share, state: Facts, done: Callable[[], None]
    ) -> None:
        began = time.monotonic()
        self.verified.append(
            write_checkpoint(self.folder, step, self.files, weights, optimizer, state)
        )
        if self.team.is_main:
            prune(self.folder, self.keep, self.verified)
            done()
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
