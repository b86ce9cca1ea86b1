"""The checkpoints on disk, as ``llmtrain runs check`` and the report list them."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llmtrain.record.checkpoint import MANIFEST, eval_losses
from llmtrain.types import JsonObject


class SavedCheckpoint(NamedTuple):
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        step: the number in its name, or the name if it has none.
        size: the bytes of its files, or 0 if they cannot be read.
        written: when it was committed, in seconds since 1970.
        eval_loss: the eval loss at this step, if it was evaluated.
        is_best: whether this eval loss is the lowest of the listed checkpoints.
    """

    path: Path
    step: int | str
    size: int
    written: float
    eval_loss: float | None
    is_best: bool

    def as_json(self) -> JsonObject:
        """Return the checkpoint as a report for programs lists it."""
        return {
            "step": self.step,
            "written": self.written,
            "size": self.size,
            "eval_loss": self.eval_loss,
            "is_best": self.is_best,
        }


def saved_checkpoints(paths: Sequence[Path]) -> Iterator[SavedCheckpoint]:
    """Yield the checkpoints, the newest first.

    Those are left out which a run in progress has deleted meanwhile.

    Args:
        paths: the folders of the checkpoints, the oldest first.
    """
    losses = eval_losses(paths)
    best = min(losses, key=losses.__getitem__, default=None)
    for path in reversed(paths):
        manifest = path / MANIFEST
        try:
            written = (manifest if manifest.exists() else path).lstat().st_mtime
        except FileNotFoundError:
            continue

        number = path.name.removeprefix("step-")
        yield SavedCheckpoint(
            path=path,
            step=int(number) if number.isdecimal() else number,
            size=_bytes_of(path),
            written=written,
            eval_loss=losses.get(path),
            is_best=path == best,
        )


def _bytes_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    return 0
