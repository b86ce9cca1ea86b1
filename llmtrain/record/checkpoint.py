"""Checkpoints that are complete or absent, hold safetensors and JSON only, and say so with a hash for every file.

    step-00000400/
      model/            what from_pretrained loads: one file, or one of each rank where the model is sharded
      optimizer/        safetensors, keyed by parameter name
      state.json        format version, step, tokens, identity, layout
      MANIFEST.json     format version; bytes and sha256 of every file above

A folder is filled under another name and renamed when all of it is on the disk: the rename is the commit.
"""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import new_folder, read_hashed, read_object, temporary_sibling, write_hashed
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import fill
from llmtrain.parallel.team import ALONE, Team
from llmtrain.record.format import check_not_newer, read_versioned, version_fault, with_version
from llmtrain.record.provenance import digest
from llmtrain.record.tensors import Share, as_it_is, write_tensors
from llmtrain.types import Facts, ModelWriter, Published, Weights

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTS = ("model/*.safetensors", "optimizer/*.safetensors")  # of the model, or of an adapter
_SPARE_BYTES = 1 << 24  # for everything that is no tensor


def write_checkpoint(
    folder: Path, step: int, files: ModelWriter, weights: Share, optimizer: Share, state: Facts
) -> Path:
    """Commit ``folder/step-N``; the ranks of the shares' team call this together.

    Raises :class:`UserError` where it cannot be written, and then leaves what was there untouched.
    """
    team, target = weights.team, path_of(folder, step)

    def begin() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = weights.bytes + optimizer.bytes, shutil.disk_usage(folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(
                f"{needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free on that disk"
            )
        working = committing.enter_context(new_folder(target))
        (working / "model").mkdir()
        (working / "optimizer").mkdir()
        return working

    try:
        with contextlib.ExitStack() as committing:
            working = team.main(begin)
            written = team.each(lambda: write_tensors(working, f"model/{files.weights}", weights))
            written += team.each(
                lambda: write_tensors(working, "optimizer/state.safetensors", optimizer)
            )
            if team.is_main:
                hashes = {name: entry for file in written for name, entry in file.items()}
                _write_beside(working / "model", files, weights)
                content = _as_json(with_version(state))
                hashes["state.json"] = write_hashed(working / "state.json", [content])
                for name in _files(working) - hashes.keys():
                    hashes[name] = read_hashed(working / name)

                manifest = with_version({"files": hashes})
                write_hashed(working / MANIFEST, [_as_json(manifest)])
    except (OSError, UserError) as error:
        why = first_line(error).rstrip(".")
        raise UserError(
            f"{target} could not be written ({why}); older checkpoints are untouched."
        ) from None
    return target


def write_model(
    folder: Path,
    files: ModelWriter,
    tensors: DistributedTensors,
    team: Team = ALONE,
    published: Published = as_it_is,
) -> None:
    """Write a complete model folder in the place of ``folder``; the ranks of a team call this together."""
    weights = Share(tensors, team, files.divisible, published)
    with contextlib.ExitStack() as committing:
        working = team.main(lambda: committing.enter_context(new_folder(folder)))
        team.each(lambda: write_tensors(working, files.weights, weights))
        if team.is_main:
            _write_beside(working, files, weights)


def _write_beside(folder: Path, files: ModelWriter, weights: Share) -> None:
    """Write all of a model folder but the weights; with an index, where those are several files."""
    files.write(folder, sum(tensor.numel() for tensor in weights.source.tensors.values()))
    names = weights.files(files.weights)
    if len(names) > 1:
        files_of = zip(names, weights.dealt, strict=True)
        places = {name: file for file, dealt in files_of for name, _, _ in weights.headers(dealt)}
        index = {
            "metadata": {"total_size": weights.bytes},
            "weight_map": dict(sorted(places.items())),
        }
        (folder / f"{files.weights}.index.json").write_bytes(_as_json(index))


def checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def newest_valid(folder: Path, set_aside: bool = False, identity: str | None = None) -> Path | None:
    """Return the newest checkpoint that is whole, or ``None`` if the run has never saved one.

    Args:
        folder: the run's folder ``checkpoints``.
        set_aside: rename damaged checkpoints, so that no later start reads them again.
        identity: sha256 of the run's identity. A checkpoint of another run counts as damaged.

    Raises:
        UserError: there are checkpoints, and none is whole: starting afresh would hide the loss.
            Or the newest is in a newer format: an older one would silently repeat its steps.
    """
    candidates = checkpoints(folder)
    for path in reversed(candidates):
        fault = find_fault(path, identity)
        if fault is None:
            return path
        say("resume", f"{path.name} is damaged: {fault}")
        if set_aside:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if candidates or [*folder.glob("damaged-*")]:
        raise UserError(
            f"no checkpoint in {folder} is whole; use --resume_from_checkpoint never for a new run."
        )
    return None


def find_fault(path: Path, identity: str | None = None) -> str | None:
    """Return why a checkpoint cannot be trusted, or ``None``.

    The folder must hold exactly the files of its manifest, with their bytes. Its state must
    belong to the step in its name, and to the run whose identity has this sha256. Neither a link
    nor a name in a manifest is followed.

    Raises:
        UserError: the checkpoint is in a newer format, which is no damage.
    """
    try:
        return next(_faults(path, identity), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} or state.json: {first_line(error)}"


def _faults(path: Path, identity: str | None) -> Iterator[str]:
    if path.is_symlink():
        yield "it is a link"
    present = _files(path)
    if MANIFEST not in present:
        yield f"{MANIFEST} is missing"
    manifest = json.loads((path / MANIFEST).read_text())
    check_not_newer(path / MANIFEST, manifest)
    if fault := version_fault(MANIFEST, manifest):
        yield fault

    hashes = manifest["files"]
    for part in _PARTS:
        if not any(Path(name).match(part) for name in present):
            yield f"{part} is missing"
    for name in sorted({"state.json", *hashes} - present):
        yield f"{name} is missing"
    for name in sorted(present - {MANIFEST} - hashes.keys()):
        yield f"{name} is not in the manifest"

    with ThreadPoolExecutor() as readers:
        contents = readers.map(lambda name: read_hashed(path / name), hashes)
        for name, content in zip(hashes, contents, strict=True):
            if content != hashes[name]:
                yield f"{name} differs from its hash"

    state = read_state(path)
    if fault := version_fault("state.json", state):
        yield fault
    if state["step"] != int(path.name.removeprefix("step-")):
        yield f"it is of step {state['step']}"
    if identity not in (None, state.get("identity_sha256")):
        yield "it belongs to another run"


def read_state(path: Path) -> Facts:
    """Return the content of a checkpoint's ``state.json``.

    Raises:
        UserError: a newer llmtrain has written the checkpoint.
    """
    state = dict(json.loads((path / "state.json").read_text()))
    check_not_newer(path / "state.json", state)
    return state


def bytes_of(path: Path) -> int:
    """Return the size of a checkpoint's files, or 0 if its manifest cannot be read."""
    hashes = read_versioned(path / MANIFEST).get("files", {})
    return sum(entry["bytes"] for entry in hashes.values())


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def prune(folder: Path, keep: int, verified: Collection[Path]) -> None:
    """Delete old checkpoints, after a newer one was committed.

    The newest ``keep`` stay, and so do the newest two of those that this process has written or read whole, the one
    with the lowest held-out loss, and the one that early stopping has found the best.
    """
    every = checkpoints(folder)
    losses = held_out_losses(every)
    best = {min(losses, key=losses.__getitem__, default=None)}
    if every and (judged := read_object(every[-1] / "state.json").get("best")):
        best.add(path_of(folder, judged[1]))
    staying = {*every[-max(keep, 1) :], *[path for path in every if path in verified][-2:], *best}
    for path in every:
        if path not in staying:
            # Rename it first: a crash must not leave half of a committed checkpoint.
            doomed = path.rename(temporary_sibling(path, "doomed"))
            shutil.rmtree(doomed, ignore_errors=True)


def held_out_losses(paths: Iterable[Path]) -> dict[Path, float]:
    """Return the loss of each checkpoint that was evaluated when it was made."""
    said = {path: read_object(path / "state.json").get("eval_loss") for path in paths}
    return {
        path: loss for path, loss in said.items() if isinstance(loss, float) and math.isfinite(loss)
    }


def digest_of(path: Path) -> str:
    """Return one sha256 over a checkpoint's weights and optimizer, to compare runs bit for bit."""
    manifest = json.loads((path / MANIFEST).read_text())
    check_not_newer(path / MANIFEST, manifest)
    hashes = {
        name: entry["sha256"]
        for name, entry in manifest["files"].items()
        if name.endswith(".safetensors")
    }
    return digest(hashes)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as ``{parameter name}.{key}`` tensors."""
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    return {
        f"{names[parameter]}.{key}": value
        if isinstance(value, torch.Tensor)
        else torch.as_tensor(value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Weights) -> None:
    """Load what :func:`optimizer_tensors` returned, by name, one full tensor at a time.

    The groups' settings stay those of this run.
    """
    parameters = dict(model.named_parameters())
    places = {
        p: place
        for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, whole in tensors:
        name, _, entry = key.rpartition(".")
        parameter, held = parameters[name], whole
        if (
            parameter.is_meta or parameter not in places
        ):  # another rank holds it, or this run does not train it
            continue
        if (
            isinstance(parameter, DTensor) and whole.shape == parameter.shape
        ):  # not the count of steps, which all hold
            held = torch.empty_like(parameter.detach(), dtype=whole.dtype)
            fill({key: held}, [(key, whole)])
        state.setdefault(places[parameter], {})[entry] = held
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _files(folder: Path) -> set[str]:
    """Return the relative names of all files; a link is none of them."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def _as_json(content: Facts) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
