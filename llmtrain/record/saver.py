"""Saves the checkpoints of a run, at once or in the background, and writes its finished model."""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from llmtrain.console import note, size_text
from llmtrain.errors import UserError, first_line
from llmtrain.files import (
    Hashed,
    JsonObject,
    errors_name,
    json_text,
    new_folder,
    read_hashed,
    sync,
    sync_tree,
    temporary_sibling,
    write_hashed,
    write_json,
)
from llmtrain.interfaces.model import ModelFormat, TensorConverter
from llmtrain.parallel.ranks import THIS_RANK, Team
from llmtrain.parallel.shards import meta_like
from llmtrain.record.checkpoint import MANIFEST, STRUCTURE, file_names, path_of, prune
from llmtrain.record.run_record import FORMAT_VERSION, VERSION_KEY
from llmtrain.record.state_tree import FlatState
from llmtrain.record.tensor_files import FilePlan, unchanged, write_tensors

_SPARE_BYTES = 1 << 24  # for all files without tensors


class Saver:
    """Saves checkpoints into a folder, and deletes old ones.

    By default this rank saves alone. The ranks of a sharded model save together: see :meth:`join`.
    In the background, one save runs at a time. The next :meth:`wait` raises its error.

    Args:
        folder: the folder of the checkpoints.
        files: the files of the model's folder besides the weights.
        keep: how many of the newest checkpoints stay.
        in_background: copy the tensors to the host, and write them while training continues.

    Attributes:
        team: the ranks that save together.
        ranks: those of them that can write to the folder.
        verified: the checkpoints that this process has written, or read completely.
        longest_seconds: the longest time that a save has taken so far.
    """

    def __init__(
        self, folder: Path, files: ModelFormat, keep: int, in_background: bool = False
    ) -> None:
        self.folder = folder
        self.files = files
        self.keep = keep
        self.team = THIS_RANK
        self.ranks: tuple[int, ...] = (0,)
        self.verified: list[Path] = []
        self.longest_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, "saving") if in_background else None
        self._pending: Future[None] | None = None
        self._host_copies: dict[tuple[str, str], torch.Tensor] = {}  # by file and name

    def join(self, team: Team, can_write: bool) -> None:
        """Let the ranks of a team save together from now on; all of them call this.

        Args:
            team: the ranks.
            can_write: whether this rank can write to the folder. Those that can divide the tensors
                among them.
        """
        self.team = team
        answers = team.on_all(lambda: can_write)
        self.ranks = tuple(rank for rank, answer in enumerate(answers) if answer)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed. :meth:`wait` will raise its error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def save(
        self,
        step: int,
        weights: dict[str, torch.Tensor],
        states: Mapping[str, FlatState],
        state: JsonObject,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit a checkpoint of the tensors as they are now.

        Args:
            step: steps made so far.
            weights: the tensors of the model.
            states: further states by their folders in the checkpoint, such as ``optimizer``.
            state: the content of ``state.json``, except for its format version.
            on_commit: called on rank 0 when the checkpoint is committed.

        Raises:
            UserError: if the checkpoint cannot be written, or if an earlier save in the background
                has failed. Earlier checkpoints are left unchanged.
        """
        self.wait()
        weight_plan = _plan_of_weights("model", self.files, weights, self.ranks)
        plans = [weight_plan]
        json_files = {"state.json": state}
        for folder, flat_state in states.items():
            plans.append(FilePlan(f"{folder}/state.safetensors", flat_state.tensors, self.ranks))
            json_files[f"{folder}/{STRUCTURE}"] = flat_state.structure

        if self._pool is None:
            self._commit(step, plans, json_files, on_commit)
        else:
            # Free the memory of copies of tensors that are in none of these plans.
            planned = {plan.path: plan.tensors for plan in plans}
            for path, name in [*self._host_copies]:
                if name not in planned.get(path, {}):
                    del self._host_copies[path, name]
            host_plans = [self._on_host(plan) for plan in plans]
            self._pending = self._pool.submit(self._commit, step, host_plans, json_files, on_commit)

    def wait(self) -> None:
        """Wait until no save is under way, and raise the error of the last one if it has failed."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def _commit(
        self,
        step: int,
        plans: list[FilePlan],
        json_files: dict[str, JsonObject],
        on_commit: Callable[[], None],
    ) -> None:
        """Write a checkpoint, which is complete or absent at every moment, and delete old ones.

        All ranks of the team call this, in the background on a thread. If one of them fails to
        write its tensors, all raise. What rank 0 does alone after that raises on rank 0, and
        :mod:`llmtrain.training.run_state` raises it on the others. See :meth:`save`.

        Args:
            step: steps made so far.
            plans: the files with tensors, first those of the weights.
            json_files: the contents of further files, except for the format version, by path.
            on_commit: called on rank 0 when the checkpoint is committed.
        """
        start = time.monotonic()
        team = self.team
        target = path_of(self.folder, step)
        working = team.on_main(lambda: temporary_sibling(target))
        try:
            # 1. Rank 0 makes a folder under a temporary name, if the disk has room.
            team.on_main(lambda: _make_folders(working, plans))

            # 2. Each rank writes its tensors, hashed on their way and forced to the disk. `on_all`
            # returns when all ranks have done so, and raises on all ranks if one has failed.
            hashes: dict[str, Hashed] = {}
            for plan in plans:
                for rank_files in team.on_all(
                    functools.partial(write_tensors, working, plan, team.rank)
                ):
                    hashes.update(rank_files)
            if team.is_main:
                # 3. Rank 0 writes the other files, and last the manifest with all hashes.
                with errors_name(working):
                    _write_model_files(working, self.files, plans[0])
                for name, content in json_files.items():
                    hashes[name] = _write_hashed_json(working / name, content)
                for name in file_names(working) - hashes.keys():
                    hashes[name] = read_hashed(working / name)
                _write_hashed_json(working / MANIFEST, {"files": hashes})

                # 4. All of it reaches the disk before the new name does: the rename commits.
                sync_tree(working)
                working.rename(target)
                sync(self.folder)
        except (OSError, UserError) as error:
            reason = first_line(error).rstrip(".")
            # If only the last sync has failed, the checkpoint is there.
            failure = "may be lost in a power cut" if target.exists() else "could not be written"
            raise UserError(
                f"{target} {failure} ({reason}); older checkpoints are untouched."
            ) from None
        finally:
            if team.is_main:  # a committed checkpoint has left this name
                shutil.rmtree(working, ignore_errors=True)

        # 5. Only now may old checkpoints go.
        if team.is_main:
            self.verified.append(target)
            try:
                prune(self.folder, self.keep, self.verified)
            except OSError as error:  # the next save tries again
                note(f"old checkpoints could not be deleted ({first_line(error)})")
            on_commit()
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - start)

    def _on_host(self, plan: FilePlan) -> FilePlan:
        """Return a plan with copies, on the host, of the tensors that this rank writes.

        Of all other tensors it has only the shapes. The memory of the copies is used again by the
        next save: allocating new pages would take longer than copying.
        """
        copies = {name: meta_like(tensor) for name, tensor in plan.tensors.items()}
        for name, tensor in plan.full_tensors():
            key = (plan.path, name)  # a parameter and its optimizer state may have the same name
            host_copy = self._host_copies.get(key)
            if host_copy is None or (host_copy.shape, host_copy.dtype) != (
                tensor.shape,
                tensor.dtype,
            ):
                host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_copies[key] = host_copy
            copies[name] = host_copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

        if any(tensor.is_cuda for tensor in plan.tensors.values()):
            torch.cuda.synchronize()
        return replace(plan, tensors=copies)


def write_model(
    folder: Path,
    files: ModelFormat,
    tensors: dict[str, torch.Tensor],
    team: Team = THIS_RANK,
    ranks: tuple[int, ...] = (0,),
    convert: TensorConverter = unchanged,
) -> None:
    """Write a complete model folder. The ranks of a team call this together.

    Args:
        folder: the folder, which is replaced if it exists.
        files: the files of the folder besides the weights.
        tensors: the tensors of the model.
        team: the ranks that hold the tensors.
        ranks: those of them that can write to the folder.
        convert: see :class:`llmtrain.record.tensor_files.FilePlan`.
    """
    weights = _plan_of_weights("", files, tensors, ranks, convert)
    with contextlib.ExitStack() as committing:
        working = team.on_main(lambda: committing.enter_context(new_folder(folder)))
        team.on_all(lambda: write_tensors(working, weights, team.rank))
        if team.is_main:
            _write_model_files(working, files, weights)


def _plan_of_weights(
    part: str,
    files: ModelFormat,
    tensors: dict[str, torch.Tensor],
    ranks: tuple[int, ...],
    convert: TensorConverter = unchanged,
) -> FilePlan:
    """Plan the weights of a model folder, which is the given part of the folder to write."""
    path = str(Path(part, files.weights_name))
    return FilePlan(path, tensors, ranks if files.may_split_weights else ranks[:1], convert)


def _make_folders(working: Path, plans: list[FilePlan]) -> None:
    """Make the folders of a checkpoint.

    Raises:
        OSError: if the disk has no room for the tensors.
    """
    parent = working.parent
    parent.mkdir(parents=True, exist_ok=True)
    needed = sum(plan.byte_count for plan in plans) + _SPARE_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(f"{size_text(needed)} are needed and {size_text(free)} are free on that disk")
    for plan in plans:
        (working / plan.path).parent.mkdir(parents=True)


def _write_model_files(working: Path, files: ModelFormat, weights: FilePlan) -> None:
    """Write all of a model folder except for the weights.

    If there are several files of weights, this includes an index of them.
    """
    first_file = working / weights.path
    files.write(first_file.parent, sum(tensor.numel() for tensor in weights.tensors.values()))
    if len(weights.ranks) == 1:
        return

    weight_map: dict[str, str] = {}
    for rank, path in weights.paths.items():
        weight_map |= dict.fromkeys(weights.tensors_of(rank), Path(path).name)
    index = {
        "metadata": {"total_size": weights.byte_count},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(first_file.with_name(f"{first_file.name}.index.json"), index, durable=False)


def _write_hashed_json(path: Path, content: JsonObject) -> Hashed:
    """Write a JSON file with its format version, force it to the disk, and return its hash."""
    text = json_text({VERSION_KEY: FORMAT_VERSION, **content}, indent=2) + "\n"
    return write_hashed(path, [text.encode()])
