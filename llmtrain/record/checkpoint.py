"""Checkpoints that are complete or absent, hold safetensors and JSON only, and say so with a hash for every file.

    step-00000400/
      model/            what from_pretrained loads: one file, or one of each process where the model is sharded
      optimizer/        safetensors, keyed by parameter name
      state.json        step, tokens, identity, layout
      MANIFEST.json     bytes and sha256 of every file above

A folder is filled under another name and renamed when all of it is on the disk: the rename is the commit.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.contract import ModelWriter, Published
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder, read_hashed, write_hashed
from llmtrain.parallel.mesh import Spread, fill
from llmtrain.record.team import ALONE, Team
from llmtrain.record.tensors import Share, as_it_is, write_tensors

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTS = ("model/*.safetensors", "optimizer/*.safetensors")  # of the model, or of an adapter
_OPTIMIZER = "state.safetensors"
_KEPT_AT_LEAST = 2
_SPARE_BYTES = 1 << 24  # for everything that is no tensor


def write_checkpoint(
    folder: Path,
    step: int,
    files: ModelWriter,
    weights: Share,
    optimizer: Share,
    state: dict[str, Any],
    team: Team = ALONE,
) -> Path:
    """Commit ``folder/step-N``; the processes of a team call this together. Raises :class:`UserError` where it cannot
    be written, and then leaves what was there untouched."""
    target = folder / f"step-{step:08d}"

    def begin() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(t.numel() * t.element_size() for share in (weights, optimizer) for t in share.tensors.values())
        free = shutil.disk_usage(folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(f"{needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free on that disk")
        working = committing.enter_context(new_folder(target))
        (working / "model").mkdir()
        (working / "optimizer").mkdir()
        return working

    def write_shares() -> dict[str, Any]:
        return {
            f"{part}/{file}": about
            for part, name, share in (("model", files.weights, weights), ("optimizer", _OPTIMIZER, optimizer))
            for file, about in write_tensors(working / part, name, share).items()
        }

    try:
        with contextlib.ExitStack() as committing:
            working = team.main(begin)
            manifest = {name: about for written in team.each(write_shares) for name, about in written.items()}
            if team.is_main:
                _write_beside(working / "model", files, weights)
                manifest["state.json"] = write_hashed(working / "state.json", [_as_json(state)])
                manifest |= {name: read_hashed(working / name) for name in _files(working) - manifest.keys()}
                write_hashed(working / MANIFEST, [_as_json(manifest)])
    except OSError as error:
        raise UserError(f"{target} could not be written ({error}); older checkpoints are untouched.") from None
    return target


def write_model(
    folder: Path,
    files: ModelWriter,
    tensors: Spread,
    team: Team = ALONE,
    published: Published = as_it_is,
) -> None:
    """Write a complete model folder in the place of ``folder``; the processes of a team call this together."""
    weights = replace(share_of(tensors, team, files.divisible), published=published)
    with contextlib.ExitStack() as committing:
        working = team.main(lambda: committing.enter_context(new_folder(folder)))
        team.each(lambda: write_tensors(working, files.weights, weights))
        if team.is_main:
            _write_beside(working, files, weights)


def share_of(spread: Spread, team: Team = ALONE, divisible: bool = True) -> Share:
    """Return the tensors of a file as this rank of a team writes them."""
    writers = team.writers if divisible else team.writers[:1]
    return Share(spread.tensors, team.rank, writers, homes=spread.homes)


def _write_beside(folder: Path, files: ModelWriter, weights: Share) -> None:
    """All of a model folder but the weights; with an index, where those are several files."""
    files.write(folder, sum(tensor.numel() for tensor in weights.tensors.values()))
    names = weights.files(files.weights)
    if len(names) > 1:
        files_of = zip(names, weights.dealt, strict=True)
        places = {about[0]: file for file, dealt in files_of for about in weights.headers(dealt)}
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{files.weights}.index.json").write_bytes(_as_json(index))


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
    yield from (f"{part} is missing" for part in _PARTS if not any(Path(name).match(part) for name in present))
    needed = {MANIFEST, "state.json", *manifest}
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
        f"{names[parameter]}.{key}": value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def digest_of(path: Path) -> str:
    """One sha256 over the weights and the optimizer of a checkpoint, to compare runs bit for bit."""
    manifest = json.loads((path / MANIFEST).read_text())
    tensors = {name: entry["sha256"] for name, entry in manifest.items() if name.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Give back what :func:`optimizer_tensors` took, by name, one whole tensor at a time; the groups' settings stay
    those of this run."""
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, whole in tensors:
        name, _, entry = key.rpartition(".")
        like, held = parameters[name].detach(), whole
        if like.is_meta:  # another process holds it
            continue
        if isinstance(like, DTensor) and whole.shape == like.shape:  # not the count of steps, which all hold
            held = torch.empty_like(like, dtype=whole.dtype)
            fill({key: held}, [(key, whole)])
        by_parameter.setdefault(name, {})[entry] = held
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
