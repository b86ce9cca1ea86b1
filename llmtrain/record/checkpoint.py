"""Checkpoints that are complete or absent, hold safetensors and JSON only, and say so with a hash for every file.

    step-00000400/
      model/            what from_pretrained loads
      optimizer/        state.safetensors, keyed by parameter name
      state.json        step, tokens, identity, layout
      MANIFEST.json     bytes and sha256 of every file above

A folder is filled under another name and renamed when all of it is on the disk: the rename is the commit.
"""

import contextlib
import hashlib
import inspect
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder, read_hashed, write_hashed
from llmtrain.record.tensors import write_tensors

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
_WEIGHTS = "model/*.safetensors"  # one file: the model's, or an adapter's
_OPTIMIZER = "optimizer/state.safetensors"
_KEPT_AT_LEAST = 2
# Tensors of their own, not pages of a file that may be deleted; and sooner ready, where safetensors can.
_READ: Any = {"backend": "pread"} if "backend" in inspect.signature(load_file).parameters else {}
_SPARE_BYTES = 1 << 24  # for everything that is no tensor


class ModelWriter(Protocol):
    """How a model becomes a folder, and is restored."""

    @property
    def weights(self) -> str:
        """The name of the file that holds the weights."""

    def write(self, folder: Path, parameters: int) -> None:
        """Write all of a model folder but its weights, of which there are ``parameters``."""

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of a model."""

    def load(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        """Give it back."""

    def exported(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What the finished model's folder holds."""


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
    needed = sum(t.numel() * t.element_size() for part in (weights, optimizer_state) for t in part.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(f"{needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free on that disk")
        with new_folder(target) as working:
            manifest = {f"model/{files.weights}": write_model(working / "model", files, weights)}
            (working / "optimizer").mkdir()
            manifest[_OPTIMIZER] = write_tensors(working / _OPTIMIZER, optimizer_state)
            manifest["state.json"] = write_hashed(working / "state.json", [_as_json(state)])
            manifest |= {name: read_hashed(working / name) for name in _files(working) - manifest.keys()}
            write_hashed(working / MANIFEST, [_as_json(manifest)])
    except OSError as error:
        raise UserError(f"{target} could not be written ({error}); older checkpoints are untouched.") from None
    return target


def write_model(folder: Path, files: ModelWriter, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a complete model folder; returns ``bytes`` and ``sha256`` of the weights' file."""
    files.write(folder, sum(tensor.numel() for tensor in weights.values()))
    return write_tensors(folder / files.weights, weights)


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    found = folder.glob("step-*") if folder.is_dir() else ()
    return sorted((p for p in found if _NAME.fullmatch(p.name)), key=lambda p: int(p.name.removeprefix("step-")))


def newest_valid(folder: Path, set_aside: bool = False, identity: str | None = None) -> Path | None:
    """The newest checkpoint that verifies, and is of the run with this identity's sha256; those that do not are named,
    and set aside in a folder that is ours. ``None`` where there never was one.

    Raises :class:`UserError` where there are checkpoints and none is whole: starting afresh would hide the loss.
    """
    candidates = checkpoints(folder)
    for path in reversed(candidates):
        fault = find_fault(path)
        if fault is None and identity not in (None, read_state(path).get("identity_sha256")):
            fault = "it belongs to another run"
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
    """Why a checkpoint cannot be trusted, or ``None``: exactly the files of its manifest are there, with their bytes,
    and it is of the step that its name says. No name in a manifest is followed, nor is a link."""
    try:
        return next(_faults(path), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} or state.json: {first_line(error)}"


def _faults(path: Path) -> Iterator[str]:
    if path.is_symlink():
        yield "it is a link"
    present = _files(path)
    manifest = json.loads((path / MANIFEST).read_text()) if MANIFEST in present else {}
    if not any(Path(name).match(_WEIGHTS) for name in present):
        yield f"{_WEIGHTS} is missing"
    needed = {MANIFEST, _OPTIMIZER, "state.json", *manifest}
    yield from (f"{name} is missing" for name in sorted(needed - present))
    yield from (f"{name} is not in the manifest" for name in sorted(present - {MANIFEST} - manifest.keys()))
    with ThreadPoolExecutor() as readers:
        for name, found in zip(manifest, readers.map(lambda name: read_hashed(path / name), manifest), strict=True):
            if found != manifest[name]:
                yield f"{name} differs from its hash"
    if read_state(path)["step"] != int(path.name.removeprefix("step-")):
        yield f"it is of step {read_state(path)['step']}"


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text())


def prune(folder: Path, keep: int, verified: Collection[Path]) -> None:
    """Delete the oldest, after a newer one was committed. The newest ``keep`` stay, and so do the newest two of those
    that this process has written or read whole, and the one with the lowest held-out loss."""
    every = checkpoints(folder)
    staying = {*every[-max(keep, 1) :], *[path for path in every if path in verified][-_KEPT_AT_LEAST:], _best(every)}
    for path in every:
        if path in staying:
            continue
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
    return load_file(next(path.glob(_WEIGHTS)), **_READ)


def load_optimizer_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / _OPTIMIZER, **_READ)


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


def _files(folder: Path) -> set[str]:
    """Relative names of all files; a link is none of them."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _best(every: list[Path]) -> Path | None:
    losses = {}
    for path in every:
        with contextlib.suppress(OSError, ValueError):
            losses[path] = read_state(path).get("eval_loss")
    known = {path: loss for path, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    return min(known, key=lambda path: known[path], default=None)
