"""Checkpoints that are complete or absent, hold safetensors and JSON only, and say so with a hash for every file.

    step-00000400/
      model/            what from_pretrained loads
      optimizer/        state.safetensors, keyed by parameter name
      state.json        step, tokens, identity, layout
      MANIFEST.json     bytes and sha256 of every file above

A folder is filled under another name and renamed when all of it is on the disk: the rename is the commit.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import new_folder, write_json

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
_KEPT_AT_LEAST = 2


class ModelWriter(Protocol):
    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write a complete model folder."""


def write_checkpoint(
    folder: Path,
    step: int,
    files: ModelWriter,
    weights: dict[str, torch.Tensor],
    optimizer_state: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> Path:
    """Commit ``folder/step-N``; only one process of a run calls this. Raises :class:`UserError` where it cannot be
    written, and then leaves what was there untouched."""
    target = folder / f"step-{step:08d}"
    try:
        with new_folder(target) as working:
            files.write(working / "model", weights)
            (working / "optimizer").mkdir()
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer_state.items()}
            save_file(tensors, working / "optimizer" / "state.safetensors")
            write_json(working / "state.json", state)
            paths = sorted(path for path in working.rglob("*") if path.is_file())
            write_json(working / MANIFEST, {str(path.relative_to(working)): _describe(path) for path in paths})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target} could not be written ({error}); older checkpoints are untouched.") from None
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted((p for p in found if _NAME.fullmatch(p.name)), key=lambda p: int(p.name.removeprefix("step-")))


def newest_valid(folder: Path, set_aside: bool = False) -> Path | None:
    """The newest checkpoint that verifies; those that do not are named, and set aside in a folder that is ours.
    ``None`` where there never was one.

    Raises :class:`UserError` where there are checkpoints and none is whole: starting afresh would hide the loss.
    """
    candidates = checkpoints(folder)
    for path in reversed(candidates):
        fault = find_fault(path)
        if fault is None:
            return path
        say("resume", f"{path.name} is damaged: {fault}")
        if set_aside:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if candidates or [*folder.glob("damaged-*")]:
        raise UserError(f"no checkpoint in {folder} is whole; use --resume_from_checkpoint never for a new run.")
    return None


def find_fault(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or ``None``: every file of the manifest is there, with its bytes."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, described in manifest.items():
            file = path / name
            if file.is_symlink() or not file.is_file():
                return f"{name} is missing"
            if _describe(file) != described:
                return f"{name} differs from its hash"
        present = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {MANIFEST}
        if extra := present - set(manifest):
            return f"{min(extra)} is not in the manifest"
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def prune(folder: Path, keep: int) -> None:
    """Delete the oldest, after a newer one was committed; two always stay."""
    for path in checkpoints(folder)[: -max(keep, _KEPT_AT_LEAST)]:
        doomed = path.with_name(f".tmp-doomed-{path.name}")  # a half-deleted one must not look committed
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as ``{parameter name}.{key}`` tensors."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": torch.as_tensor(value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def digest_of(path: Path) -> str:
    """One sha256 over the weights and the optimizer of a checkpoint, to compare runs bit for bit."""
    manifest = json.loads((path / MANIFEST).read_text())
    tensors = {name: entry["sha256"] for name, entry in manifest.items() if name.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def load_optimizer_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "optimizer" / "state.safetensors")


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Give back what :func:`optimizer_tensors` took, by name; the groups' settings stay those of this run."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition(".")
        by_parameter.setdefault(name, {})[entry] = tensor
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: by_parameter[names[p]] for i, p in enumerate(order) if names[p] in by_parameter}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
