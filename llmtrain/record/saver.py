"""Checkpoints of one run, one after the other: at once, or from a copy in the background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llmtrain.contract import ModelWriter
from llmtrain.parallel.mesh import Spread, meta_like
from llmtrain.record.checkpoint import prune, share_of, write_checkpoint
from llmtrain.record.team import ALONE, Team
from llmtrain.record.tensors import Share

Tensors = dict[str, torch.Tensor]


class Saver:
    """Writes checkpoints of a run into its folder and deletes old ones; used by the processes of a team, together.

    In the background there is one save at a time; what fails there is raised by the next :meth:`wait`.
    """

    def __init__(
        self, folder: Path, files: ModelWriter, keep: int, in_background: bool = False, team: Team = ALONE
    ) -> None:
        self.folder, self.files, self.keep, self.team = folder, files, keep, team
        self.verified: list[Path] = []  # what this process has written, or read whole
        self._pool = ThreadPoolExecutor(1, "saving") if in_background else None
        self._under_way: Future[None] | None = None
        self._copies: Tensors = {}
        self.longest_seconds = 0.0  # that a checkpoint took to be written

    @property
    def failed(self) -> bool:
        """Whether a save in the background has ended with an error, which :meth:`wait` will raise."""
        pending = self._under_way
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self, step: int, weights: Spread, optimizer: Spread, state: dict[str, Any], done: Callable[[], None]
    ) -> None:
        """Commit a checkpoint, then call ``done``. In the background it is a checkpoint of the tensors as they are
        now."""
        self.wait()
        shares = share_of(weights, self.team, self.files.divisible), share_of(optimizer, self.team)
        if self._pool is None:
            self._write(step, *shares, state, done)
            return
        weights_kept, optimizer_kept = self._copy("weights", shares[0]), self._copy("optimizer", shares[1])
        self._under_way = self._pool.submit(self._write, step, weights_kept, optimizer_kept, state, done)

    def wait(self) -> None:
        """Until no save is under way. Raises what the last one raised."""
        pending, self._under_way = self._under_way, None
        if pending is not None:
            pending.result()

    def _copy(self, part: str, share: Share) -> Share:
        """What this process writes, on the host, in memory that is kept from save to save: new pages cost more than
        the copying. Of what others write the shapes stay."""
        copies = {name: meta_like(tensor) for name, tensor in share.tensors.items()}
        for name, tensor in share.wholes():
            place = self._copies.get(f"{part} {name}")
            if place is None:
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[f"{part} {name}"] = place
            copies[name] = place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in share.tensors.values()):
            torch.cuda.synchronize()
        return replace(share, tensors=copies, homes={})

    def _write(
        self, step: int, weights: Share, optimizer: Share, state: dict[str, Any], done: Callable[[], None]
    ) -> None:
        began = time.monotonic()
        self.verified.append(write_checkpoint(self.folder, step, self.files, weights, optimizer, state, self.team))
        if self.team.is_main:
            prune(self.folder, self.keep, self.verified)
            done()
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
