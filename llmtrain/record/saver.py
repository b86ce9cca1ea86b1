"""Saves the checkpoints of a run, at once or in the background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import meta_like
from llmtrain.parallel.team import THIS_RANK, Team
from llmtrain.record.checkpoint import prune, write_checkpoint
from llmtrain.record.tensors import Share
from llmtrain.types import JsonObject, ModelWriter


class Saver:
    """Writes checkpoints into a folder, and deletes old ones. All ranks of a team use it together.

    In the background, one save runs at a time. The next :meth:`wait` raises its error.

    Args:
        folder: the folder of the checkpoints.
        files: writes the other files of the model's folder.
        keep: how many of the newest checkpoints stay.
        in_background: copy the tensors to the host, and write them while training continues.
        team: the ranks that save together.

    Attributes:
        verified: the checkpoints that this process has written, or read completely.
        longest_seconds: the longest time that writing a checkpoint has taken so far.
    """

    def __init__(
        self,
        folder: Path,
        files: ModelWriter,
        keep: int,
        in_background: bool = False,
        team: Team = THIS_RANK,
    ) -> None:
        self.folder = folder
        self.files = files
        self.keep = keep
        self.team = team
        self.verified: list[Path] = []
        self.longest_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, "saving") if in_background else None
        self._pending: Future[None] | None = None
        self._host_copies: dict[tuple[str, str], torch.Tensor] = {}  # by part and name

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed. :meth:`wait` will raise its error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self,
        step: int,
        weights: DistributedTensors,
        optimizer: DistributedTensors,
        state: JsonObject,
        on_commit: Callable[[], None],
    ) -> None:
        """Commit a checkpoint of the tensors as they are now.

        Args:
            step: steps made so far.
            weights: the tensors of the model.
            optimizer: the state of the optimizer.
            state: the content of ``state.json``.
            on_commit: called on rank 0 when the checkpoint is committed.

        Raises:
            UserError: if the checkpoint cannot be written, or if an earlier save in the background
                has failed.
        """
        self.wait()
        weights_share = Share(weights, self.team, divisible=self.files.may_split_weights)
        optimizer_share = Share(optimizer, self.team)
        if self._pool is None:
            self._write(step, weights_share, optimizer_share, state, on_commit)
            return

        weights_copy = self._copy_to_host("weights", weights_share)
        optimizer_copy = self._copy_to_host("optimizer", optimizer_share)
        self._pending = self._pool.submit(
            self._write, step, weights_copy, optimizer_copy, state, on_commit
        )

    def wait(self) -> None:
        """Wait until no save is under way, and raise the error of the last one if it has failed."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def _copy_to_host(self, part: str, share: Share) -> Share:
        """Return a share with copies, on the host, of the tensors that this rank writes.

        Of all other tensors it has only the shapes. The memory of the copies is used again by the
        next save: allocating new pages would take longer than copying.

        Args:
            part: ``weights`` or ``optimizer``, whose names may be the same.
            share: the tensors.
        """
        copies = {name: meta_like(tensor) for name, tensor in share.source.tensors.items()}
        for name, tensor in share.full_tensors():
            key = (part, name)
            if key not in self._host_copies:
                self._host_copies[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            host_copy = self._host_copies[key]
            copies[name] = host_copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

        if any(tensor.is_cuda for tensor in share.source.tensors.values()):
            torch.cuda.synchronize()
        return share._replace(source=DistributedTensors(copies))

    def _write(
        self,
        step: int,
        weights: Share,
        optimizer: Share,
        state: JsonObject,
        on_commit: Callable[[], None],
    ) -> None:
        start = time.monotonic()
        path = write_checkpoint(
            self.folder,
            step,
            files=self.files,
            weights=weights,
            optimizer=optimizer,
            state=state,
        )
        self.verified.append(path)
        if self.team.is_main:
            prune(self.folder, self.keep, self.verified)
            on_commit()
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)
