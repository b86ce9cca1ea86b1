"""The state of a run: into a checkpoint and back, and into the finished model.

All ranks call these functions. If one fails on a rank, it raises on all of them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject
from llmtrain.interfaces.model import ModelFormat
from llmtrain.interfaces.part import Part
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import fill, filled_like, local_shard
from llmtrain.record import checkpoint, saver
from llmtrain.record.state_tree import FlatState, flatten, unflatten
from llmtrain.record.tensor_files import read_tensors_on_main
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run import Run


def restore(run: Run, engine: Engine, optimizer_state: OptimizerState) -> None:
    """Load the tensors of the checkpoint that a run resumes from, if there is one.

    Rank 0 reads it and sends it to the other ranks, which may have no access to the folder.
    """
    path = run.resume_point.checkpoint
    if path is None:
        return

    ranks = engine.ranks
    load_weights(run.bundle.files, engine.unwrapped, path / "model", ranks)
    structure = ranks.on_main(
        lambda: checkpoint.read_file(path / "optimizer" / checkpoint.STRUCTURE)
    )
    tensors = read_tensors_on_main(path / "optimizer", ranks)
    optimizer_state.restore(structure, tensors)
    restore_parts(run.parts.by_name(), path, ranks)

    scaler = engine.accelerator.scaler
    scaler_state = run.resume_point.state["loss_scaler"]
    if scaler is not None and scaler_state:
        scaler.load_state_dict(scaler_state)


def load_weights(files: ModelFormat, model: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Fill a model, in place, with the weights in a folder that only rank 0 need see."""
    fill(files.tensors(model), read_tensors_on_main(folder, ranks))


def restore_parts(parts: Mapping[str, Part], path: Path, ranks: Ranks) -> None:
    """Give each part the state that it has in a checkpoint; all ranks call this.

    A tensor that the part has as a DTensor is sharded like that; others are on the CPU.

    Raises:
        UserError: on all ranks, if a part cannot load its state.
    """
    stored_names = ranks.on_main(lambda: checkpoint.part_names(path))
    for name in stored_names:
        part = parts.get(name)
        if part is None:
            say("changed", f"the state of {name} in {path} is not used: this run has no such part")
            continue

        folder = path / "parts" / name
        structure = ranks.on_main(
            functools.partial(checkpoint.read_file, folder / checkpoint.STRUCTURE)
        )
        current = flat_part(name, part)
        tensors = {}
        for tensor_name, full in read_tensors_on_main(folder, ranks):
            like = current.tensors.get(tensor_name)
            if isinstance(like, DTensor) and like.shape == full.shape:
                tensors[tensor_name] = filled_like(like, full)
            else:
                tensors[tensor_name] = full.cpu()
        state = unflatten(structure["state"], tensors)
        ranks.on_all(functools.partial(_load, name, part, state, folder))


def _load(name: str, part: Part, state: dict[str, Any], folder: Path) -> None:
    """Let a part load its state, which may fail: it is the user's own code."""
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise UserError(
            f"{name} cannot load its state from {folder} ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); use the code that saved it, or start a new run "
            "with --resume_from_checkpoint never."
        ) from error


def flat_part(name: str, part: Part) -> FlatState:
    """Return the state of a part as a checkpoint holds it.

    Raises:
        UserError: if there is something that a checkpoint cannot hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = flatten(part.state_dict(), path="", owner=name, tensors=tensors)
    return FlatState({"state": tree}, tensors)


def collect_states(run: Run, optimizer_state: OptimizerState) -> dict[str, FlatState]:
    """Return the states that a checkpoint holds, by their folders; all ranks call this.

    Raises:
        UserError: on all ranks, if there is something that a checkpoint cannot hold, or if the
            ranks have different tensors. Those of shards are gathered one after another.
    """
    states: dict[str, FlatState] = {}

    def collect() -> JsonObject:
        """Collect the states of this rank, and return the forms of their tensors."""
        states["optimizer"] = optimizer_state.flatten()
        for name, part in run.parts.by_name().items():
            state = flat_part(name, part)
            if state.structure["state"]:
                states[f"parts/{name}"] = state
        return {
            f"{folder}/{name}": [str(tensor.dtype), *tensor.shape, isinstance(tensor, DTensor)]
            for folder, state in states.items()
            for name, tensor in state.tensors.items()
        }

    forms_of_ranks = run.ranks.on_all(collect)
    for rank, forms in enumerate(forms_of_ranks):
        if forms != forms_of_ranks[0]:
            raise UserError(
                f"the states of rank {rank} have other tensors than those of rank 0; every rank "
                "must keep tensors of the same names, shapes and dtypes."
            )
    return states


def save(run: Run, engine: Engine, optimizer_state: OptimizerState) -> None:
    """Save a checkpoint of the steps made so far.

    Raises:
        UserError: on every rank, if saving failed on one of them.
    """
    model = engine.unwrapped
    check_finite(model, run.ranks)
    states = collect_states(run, optimizer_state)

    def prepare() -> None:
        run.saver.wait()
        if not engine.ranks.is_main:
            return
        if run.writer.is_taken_over():
            raise UserError(
                f"{run.folder}: another run has taken over this folder, so no checkpoint was "
                "saved; use another --output_dir."
            )
        run.writer.sync_logs()

    def write() -> None:
        run.saver.save(
            run.step,
            weights=run.bundle.files.tensors(model),
            states=states,
            state=_state(run, engine),
            # On rank 0. Another thread may call it.
            on_commit=functools.partial(run.writer.set_status, "running", run.step),
        )

    _on_saving_ranks(run, prepare)
    _on_saving_ranks(run, write)
    run.deadline.reserve("save", 2 * run.saver.longest_seconds)


def _state(run: Run, engine: Engine) -> JsonObject:
    """Return the content of ``state.json``, except for its format version."""
    eval_loss = None
    if run.status.eval_step == run.step and math.isfinite(run.status.eval_loss or 0.0):
        eval_loss = run.status.eval_loss
    scaler = engine.accelerator.scaler

    return {
        **run.status.for_checkpoint(),
        "eval_loss": eval_loss,
        "best": run.patience.state if run.patience.keeps_best else None,
        "fingerprint": run.fingerprint,
        "fingerprint_sha256": run.resume_point.fingerprint_sha256,
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
    }


def load_best(run: Run, engine: Engine) -> None:
    """Load the weights of the best evaluation if the run keeps them and they are not the last."""
    best_step = run.patience.best_step if run.patience.keeps_best else 0
    if best_step in (0, run.step):
        return

    path = checkpoint.path_of(run.folder / "checkpoints", best_step)
    fault = run.ranks.on_main(lambda: checkpoint.find_fault(path))
    if fault:
        run.record_event(
            "damaged",
            f"the best checkpoint, {path}: {fault}; model/ gets the last weights instead",
        )
        return

    load_weights(run.bundle.files, engine.unwrapped, path / "model", run.ranks)
    reason = run.patience.reason if run.patience.is_over else f"the best {run.patience.metric}"
    say("best", f"model/ has the weights of step {best_step}: {reason}")


def write_model(run: Run, engine: Engine, target: Path) -> None:
    """Write the model with its present weights as a folder that Hugging Face loads.

    Raises:
        UserError: on every rank, if a weight is not finite in the dtype of the folder.
    """
    wait_for_saves(run)  # a save in the background uses the same process group
    model = engine.unwrapped
    files = run.bundle.files.finished(run.settings.run.save_dtype)
    check_finite(model, run.ranks, as_float16=files.config.get("dtype") == "float16")

    def write() -> None:
        if not run.ranks.is_sharded:
            saver.write_model(target, files, files.export_tensors(model))
            return
        saver.write_model(
            target,
            files,
            files.tensors(model),
            team=run.saver.team,
            ranks=run.saver.ranks,
            convert=files.tensor_converter(model),
        )

    _on_saving_ranks(run, write)


def wait_for_saves(run: Run) -> None:
    """Wait until no save runs in the background; raise its error, if it had one."""
    _on_saving_ranks(run, run.saver.wait)


def _on_saving_ranks(run: Run, action: Callable[[], None]) -> None:
    """Run an action on the ranks that save: on rank 0, or on all ranks of a sharded model.

    An error of one rank is raised on all ranks.
    """
    run_together = run.ranks.on_all if run.ranks.is_sharded else run.ranks.on_main
    run_together(action)


def check_finite(model: nn.Module, ranks: Ranks, as_float16: bool = False) -> None:
    """Check that all parameters are finite, on every rank.

    Args:
        model: the model.
        ranks: the ranks of the run.
        as_float16: also check that float16 can hold them: nothing above 65,504.

    Raises:
        UserError: on every rank, if a parameter is not.
    """
    names = []
    flags = []
    for name, parameter in model.named_parameters():
        values = local_shard(parameter)
        if as_float16 and parameter.requires_grad:
            values = values.half()
        names.append(name)
        flags.append((~torch.isfinite(values)).any().to(ranks.device))
    if not flags:
        return
    # Each rank has only seen its own shards.
    counts = ranks.accelerator.reduce(torch.stack(flags).int(), reduction="sum")
    for name, count in zip(names, counts.tolist(), strict=True):
        if count > 0 and as_float16:
            raise UserError(
                f"{name} has values that are not finite in float16, so the model was not written; "
                "try --save_dtype bfloat16, or else lower --learning_rate."
            )
        if count > 0:
            raise UserError(
                f"{name} has values that are not finite, so nothing was saved; lower "
                "--learning_rate."
            )
