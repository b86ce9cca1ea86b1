"""Checkpoints, which are complete or absent, and have a hash for every file.

They hold safetensors and JSON only:

    step-00000400/
      model/            what from_pretrained loads; if the model is sharded, a file of each rank
      optimizer/        safetensors, keyed by parameter name
      state.json        format version, step, tokens, fingerprint, layout
      MANIFEST.json     format version; bytes and sha256 of every file above

A folder is filled under a temporary name, and renamed when all of it is on the disk. The rename is
the commit.
"""

import contextlib
import itertools
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
from llmtrain.files import (
    digest,
    json_text,
    new_folder,
    read_hashed,
    read_object,
    temporary_sibling,
    write_hashed,
)
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.shards import fill
from llmtrain.parallel.team import THIS_RANK, Team
from llmtrain.quantities import size_text
from llmtrain.record.format import check_not_newer, version_fault, with_version
from llmtrain.record.tensors import Share, unchanged, write_tensors
from llmtrain.types import JsonObject, ModelWriter, TensorConverter, Weights

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
# Every checkpoint has files of these names. `model` holds the weights of a model or of an adapter.
_TENSOR_FILES = ("model/*.safetensors", "optimizer/*.safetensors")
_SPARE_BYTES = 1 << 24  # for all files without tensors


def write_checkpoint(
    folder: Path, step: int, files: ModelWriter, weights: Share, optimizer: Share, state: JsonObject
) -> Path:
    """Commit a checkpoint. The ranks of the shares' team call this together.

    Args:
        folder: the folder of the checkpoints.
        step: steps made so far.
        files: writes the other files of the model's folder.
        weights: the tensors of the model.
        optimizer: the state of the optimizer.
        state: the content of ``state.json``, except for its format version.

    Returns:
        The path of the checkpoint.

    Raises:
        UserError: if the checkpoint cannot be written. Earlier checkpoints are left unchanged.
    """
    target = path_of(folder, step)
    try:
        _commit(target, files, weights=weights, optimizer=optimizer, state=state)
    except (OSError, UserError) as error:
        reason = first_line(error).rstrip(".")
        raise UserError(
            f"{target} could not be written ({reason}); older checkpoints are untouched."
        ) from None
    return target


def _commit(
    target: Path, files: ModelWriter, weights: Share, optimizer: Share, state: JsonObject
) -> None:
    """Write a checkpoint under a temporary name, and rename it to ``target``."""
    team = weights.team
    with contextlib.ExitStack() as committing:

        def begin() -> Path:
            target.parent.mkdir(parents=True, exist_ok=True)
            _check_space(target.parent, weights.byte_count + optimizer.byte_count)
            working = committing.enter_context(new_folder(target))
            (working / "model").mkdir()
            (working / "optimizer").mkdir()
            return working

        working = team.on_main(begin)
        written_weights = team.on_all(
            lambda: write_tensors(working, f"model/{files.weights_name}", weights)
        )
        written_optimizer = team.on_all(
            lambda: write_tensors(working, "optimizer/state.safetensors", optimizer)
        )
        if not team.is_main:
            return

        hashes: JsonObject = {}
        for written in [*written_weights, *written_optimizer]:
            hashes.update(written)
        _write_all_but_weights(working / "model", files, weights)
        hashes["state.json"] = write_hashed(working / "state.json", [_as_json(with_version(state))])
        for name in _file_names(working) - hashes.keys():
            hashes[name] = read_hashed(working / name)
        manifest = with_version({"files": hashes})
        write_hashed(working / MANIFEST, [_as_json(manifest)])


def _check_space(folder: Path, needed: int) -> None:
    """Check that the disk of a folder has room for so many bytes of tensors.

    Raises:
        OSError: if the disk has less room.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise OSError(
            f"{size_text(needed + _SPARE_BYTES)} are needed and {size_text(free)} are free on that "
            "disk"
        )


def write_model(
    folder: Path,
    files: ModelWriter,
    tensors: DistributedTensors,
    team: Team = THIS_RANK,
    convert: TensorConverter = unchanged,
) -> None:
    """Write a complete model folder. The ranks of a team call this together.

    Args:
        folder: the folder, which is replaced if it exists.
        files: writes the other files of the model's folder.
        tensors: the tensors of the model.
        team: the ranks that write.
        convert: see :class:`llmtrain.record.tensors.Share`.
    """
    weights = Share(tensors, team, divisible=files.may_split_weights, convert=convert)
    with contextlib.ExitStack() as committing:
        working = team.on_main(lambda: committing.enter_context(new_folder(folder)))
        team.on_all(lambda: write_tensors(working, files.weights_name, weights))
        if team.is_main:
            _write_all_but_weights(working, files, weights)


def _write_all_but_weights(folder: Path, files: ModelWriter, weights: Share) -> None:
    """Write all of a model folder except for the weights.

    If there are several files of weights, this includes an index of them.
    """
    files.write(folder, sum(tensor.numel() for tensor in weights.source.tensors.values()))

    file_names = weights.file_names(files.weights_name)
    if len(file_names) == 1:
        return
    weight_map = {}
    for file_name, names in zip(file_names, weights.names_by_writer, strict=True):
        for header in weights.headers(names):
            weight_map[header.name] = file_name
    index = {
        "metadata": {"total_size": weights.byte_count},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / f"{files.weights_name}.index.json").write_bytes(_as_json(index))


def checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints in a folder, oldest first."""
    paths = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=_step_of)


def _step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


class AllDamagedError(UserError):
    """A run has saved checkpoints, and none of them is intact.

    Attributes:
        checkpoints: the names of the damaged checkpoints, the newest first.
    """

    def __init__(self, folder: Path, checkpoints: list[str]) -> None:
        super().__init__(
            f"no checkpoint in {folder} is intact; use --resume_from_checkpoint never to start a "
            "new run."
        )
        self.checkpoints = checkpoints


def newest_valid(
    folder: Path,
    set_aside: bool = False,
    fingerprint: str | None = None,
    known_losses: Collection[str] = (),
) -> Path | None:
    """Return the newest intact checkpoint, or ``None`` if the run has never saved one.

    Args:
        folder: the run's ``checkpoints`` folder.
        set_aside: rename damaged checkpoints, so that no later start reads them again.
        fingerprint: sha256 of the run's fingerprint. A checkpoint of another run counts as damaged.
        known_losses: names of damaged checkpoints after whose loss the run has started again.

    Raises:
        AllDamagedError: if there are checkpoints, and none is intact: starting from the beginning
            would hide the loss.
        UserError: if the newest is in a newer format: an older one would silently repeat its steps.
    """
    candidates = checkpoints(folder)
    for path in reversed(candidates):
        fault = find_fault(path, fingerprint)
        if fault is None:
            return path

        say("resume", f"{path.name} is damaged: {fault}")
        if set_aside:
            path.rename(_free_name(path.with_name(f"damaged-{path.name}")))

    damaged = {*checkpoints(folder), *folder.glob("damaged-*")}
    new_losses = sorted({path.name for path in damaged} - {*known_losses}, reverse=True)
    if new_losses:
        raise AllDamagedError(folder, new_losses)
    return None


def _free_name(path: Path) -> Path:
    """Return a path, with -2, -3, ... at its end if it exists."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def find_fault(path: Path, fingerprint: str | None = None) -> str | None:
    """Return why a checkpoint cannot be trusted, or ``None`` if it is intact.

    The folder must hold exactly the files of its manifest, with their bytes. Its state must belong
    to the step in its name, and to the run whose fingerprint has this sha256. Links are not
    followed, and names in the manifest never lead out of the folder.

    Raises:
        UserError: if the checkpoint is in a newer format, which is no damage.
    """
    try:
        return next(_faults(path, fingerprint), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} or state.json: {first_line(error)}"


def _faults(path: Path, fingerprint: str | None) -> Iterator[str]:
    """Yield the faults of a checkpoint. After the first one, a later check may raise an error."""
    if path.is_symlink():
        yield "it is a link"
    present = _file_names(path)
    if MANIFEST not in present:
        yield f"{MANIFEST} is missing"
    manifest = json.loads((path / MANIFEST).read_text())
    check_not_newer(path / MANIFEST, manifest)
    manifest_fault = version_fault(MANIFEST, manifest)
    if manifest_fault:
        yield manifest_fault

    # Is every file there, and no other?
    hashes = manifest["files"]
    for pattern in _TENSOR_FILES:
        if not any(Path(name).match(pattern) for name in present):
            yield f"{pattern} is missing"
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
    state_fault = version_fault("state.json", state)
    if state_fault:
        yield state_fault
    if state["step"] != _step_of(path):
        yield f"it holds step {state['step']}"
    if fingerprint is not None and fingerprint != state.get("fingerprint_sha256"):
        yield "it belongs to another run"


def read_state(path: Path) -> JsonObject:
    """Return the content of a checkpoint's ``state.json``.

    Raises:
        UserError: if a newer llmtrain has written the checkpoint.
    """
    state = dict(json.loads((path / "state.json").read_text()))
    check_not_newer(path / "state.json", state)
    return state


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def prune(folder: Path, keep: int, verified: Collection[Path]) -> None:
    """Delete old checkpoints, after a newer one was committed.

    These stay:

    - the newest ``keep``,
    - the newest two that this process has written, or read completely,
    - the one with the lowest eval loss,
    - the best one by ``--metric_for_best_model``, if the run keeps it.

    Args:
        folder: the folder of the checkpoints.
        keep: how many of the newest checkpoints stay, at least 1.
        verified: the checkpoints that this process has written, or read completely.
    """
    paths = checkpoints(folder)
    kept = {
        *paths[-max(keep, 1) :],
        *[path for path in paths if path in verified][-2:],
        *_best_checkpoints(folder, paths),
    }
    for path in paths:
        if path not in kept:
            # Rename it first: a crash must not leave half of a committed checkpoint.
            doomed = path.rename(temporary_sibling(path, "doomed"))
            shutil.rmtree(doomed, ignore_errors=True)


def _best_checkpoints(folder: Path, paths: list[Path]) -> list[Path]:
    """Return the checkpoints that are the best by the eval loss, and by the run's own metric."""
    best = []
    losses = eval_losses(paths)
    if losses:
        best.append(min(losses, key=losses.__getitem__))

    if paths:
        # The choice of the best evaluation, see `Patience.state`.
        patience = read_object(paths[-1] / "state.json").get("best")
        if patience:
            best_step = patience[1]
            best.append(path_of(folder, best_step))
    return best


def eval_losses(paths: Iterable[Path]) -> dict[Path, float]:
    """Return the eval loss of each checkpoint that was evaluated when it was made."""
    losses = {}
    for path in paths:
        loss = read_object(path / "state.json").get("eval_loss")
        if isinstance(loss, float) and math.isfinite(loss):
            losses[path] = loss
    return losses


def tensors_digest(path: Path) -> str:
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
    """Return the optimizer's state as tensors, by the parameter's name and the state's key.

    An example of a name is ``wte.weight.exp_avg``.
    """
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            tensors[f"{names[parameter]}.{key}"] = tensor
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Weights) -> None:
    """Load the state that :func:`optimizer_tensors` returned into an optimizer.

    The settings of its parameter groups stay as they are.

    Args:
        model: the model of the optimizer, whose parameters may be sharded.
        optimizer: the optimizer.
        tensors: names and full tensors, one at a time.
    """
    parameters = dict(model.named_parameters())
    trained = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    indices = {parameter: index for index, parameter in enumerate(trained)}

    state: dict[int, dict[str, torch.Tensor]] = {}
    for full_name, full in tensors:
        name, _, key = full_name.rpartition(".")
        parameter = parameters[name]
        # Another pipeline stage holds the parameter, or this run does not train it.
        if parameter.is_meta or parameter not in indices:
            continue

        value = full
        # The count of steps is not sharded, and has another shape.
        if isinstance(parameter, DTensor) and full.shape == parameter.shape:
            value = torch.empty_like(parameter.detach(), dtype=full.dtype)
            fill({full_name: value}, [(full_name, full)])
        state.setdefault(indices[parameter], {})[key] = value

    param_groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _file_names(folder: Path) -> set[str]:
    """Return the names of all files below a folder, relative to it. Links are left out."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def _as_json(content: JsonObject) -> bytes:
    return (json_text(content, indent=2) + "\n").encode()
