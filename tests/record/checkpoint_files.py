"""Small checkpoints of no kind of model, and the ways in which one can be damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from llmtrain.files import Json, digest
from llmtrain.interfaces.model import TensorConverter
from llmtrain.record.checkpoint import path_of, state_hashes
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import unchanged


class Files:
    """The files of a model folder, for no kind of model."""

    weights_name = "model.safetensors"
    may_split_weights = True
    config: ClassVar[dict[str, str]] = {}

    def write(self, folder: Path, parameters: int) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()

    export_tensors = tensors

    def finished(self, dtype: str) -> "Files":
        return self

    def tensor_converter(self, model: nn.Module) -> TensorConverter:
        return unchanged


def save_step(saver: Saver, step: int, size: int = 300, **state: Json) -> None:
    """Save a checkpoint whose weights are the step, and whose moments are twice the step.

    Args:
        saver: saves it.
        step: the step after which it is saved.
        size: the number of weights.
        **state: further entries of ``state.json``.
    """
    weights = {"w": torch.full((size,), float(step))}
    moments = {"w.exp_avg": weights["w"] * 2}
    saver.save(
        step=step,
        weights=weights,
        states={"optimizer": FlatState({}, moments)},
        state={"step": step, **state},
    )


def save_checkpoint(
    folder: Path, step: int, loss: float | None = None, fingerprint: str = "mine"
) -> Path:
    """Save a small checkpoint, and delete none.

    Args:
        folder: the folder of checkpoints.
        step: the step after which it is saved.
        loss: its eval loss, if it has one.
        fingerprint: the digest of the run's settings, which says to which run it belongs.

    Returns:
        The path of the checkpoint.
    """
    saver = Saver(folder, Files(), keep=100)
    save_step(saver, step, eval_loss=loss, fingerprint_sha256=fingerprint)
    return path_of(folder, step)


def tensors_digest(path: Path) -> str:
    """Return a sha256 over all weights and states in a checkpoint, to compare runs bit for bit."""
    return digest(state_hashes(path))


def flip(path: Path) -> None:
    """Flip the lowest bit of the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# The name of a damage -> a function that damages the checkpoint at a path in this way.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a truncated file": lambda path: (path / "model/model.safetensors").write_bytes(b""),
    "a missing manifest": lambda path: (path / "MANIFEST.json").unlink(),
    "a manifest that is not JSON": lambda path: (path / "MANIFEST.json").write_text("{"),
    "a manifest that is a list": lambda path: (path / "MANIFEST.json").write_text("[]"),
    "a file that is not in the manifest": lambda path: (path / "model/x.bin").write_bytes(b"x"),
}
