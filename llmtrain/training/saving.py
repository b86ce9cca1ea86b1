"""Restore and save the checkpoints of a run, and write the finished model.

All ranks call these functions. If one fails on a rank, it raises on all of them.
"""

import functools
import math
from collections.abc import Callable

import torch
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.team import Team
from llmtrain.record import checkpoint
from llmtrain.record.loading import check_finite, load_weights, tensors_from_main
from llmtrain.record.provenance import digest, versions
from llmtrain.training.run import Run
from llmtrain.types import JsonObject


def restore(run: Run, engine: Engine, optimizer: AcceleratedOptimizer) -> None:
    """Load the checkpoint that a run resumes from, if there is one.

    Rank 0 reads it and sends it to the other ranks, which may have no access to the folder.
    """
    path = run.resume_point.checkpoint
    if path is None:
        return

    model = engine.unwrapped
    load_weights(run.bundle.files, model, path / "model", engine.device)
    tensors = tensors_from_main(path / "optimizer", engine.device)
    checkpoint.restore_optimizer(model, optimizer.optimizer, tensors)

    state = Team.everyone().on_main(lambda: checkpoint.read_state(path))
    run.state.restore(state)
    # The best checkpoint of another run is not taken over: it may be deleted before this run ends.
    is_own = path.parent == run.folder / "checkpoints"
    if state["best"] and is_own:
        run.patience.restore(state["best"])
    scaler = engine.accelerator.scaler
    if scaler is not None and state["loss_scaler"]:
        scaler.load_state_dict(state["loss_scaler"])


def save(run: Run, engine: Engine, optimizer: AcceleratedOptimizer) -> None:
    """Save a checkpoint of the steps made so far.

    Raises:
        UserError: on every rank, if saving failed on one of them.
    """
    model = engine.unwrapped
    check_finite(model, engine)

    def prepare() -> None:
        run.saver.wait()
        if engine.is_main and run.writer.is_taken_over():
            raise UserError(
                f"{run.folder}: another run has taken over this folder, so no checkpoint was "
                "saved; use another --output_dir."
            )
        if engine.is_main:
            run.writer.sync_logs()

    def write() -> None:
        optimizer_state = checkpoint.optimizer_tensors(model, optimizer.optimizer)
        weights = run.bundle.files.tensors(model)
        run.saver.save(
            run.step,
            engine.gatherable(weights),
            engine.gatherable(optimizer_state),
            _state(run, engine),
            on_commit=functools.partial(_on_commit, run, run.step),
        )

    _on_writers(run, prepare)
    _on_writers(run, write)
    run.deadline.reserve("save", 2 * run.saver.longest_seconds)


def _on_commit(run: Run, step: int) -> None:
    """Record a checkpoint that was just saved, on rank 0. It may be called by another thread."""
    run.writer.set_status("running", step)
    run.metrics.send_checkpoint(checkpoint.path_of(run.folder / "checkpoints", step))


def _state(run: Run, engine: Engine) -> JsonObject:
    """Return the content of ``state.json``, except for its format version."""
    eval_loss = None
    last_eval = run.state.last_eval
    if last_eval is not None and last_eval.step == run.step:
        loss = last_eval.metrics["eval/loss"]
        eval_loss = loss if math.isfinite(loss) else None
    scaler = engine.accelerator.scaler

    return {
        **run.state.for_checkpoint(),
        "eval_loss": eval_loss,
        "best": run.patience.state if run.patience.keeps_best else None,
        "fingerprint": run.fingerprint,
        "fingerprint_sha256": digest(run.fingerprint),
        "processes": engine.world_size,
        "threads": torch.get_num_threads(),
        "mixed_precision": engine.accelerator.mixed_precision,
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
        "versions": versions(),
    }


def load_best(run: Run, engine: Engine) -> None:
    """Load the weights of the best evaluation if the run keeps them and they are not the last."""
    best_step = run.patience.best_step if run.patience.keeps_best else 0
    if run.patience.lack_of_improvement:
        run.record_event("worse", run.patience.lack_of_improvement)
    if best_step in (0, run.step):
        return

    path = checkpoint.path_of(run.folder / "checkpoints", best_step)
    fault = Team.everyone().on_main(lambda: checkpoint.find_fault(path))
    if fault:
        run.record_event(
            "damaged",
            f"the best checkpoint, {path}: {fault}; model/ gets the last weights instead",
        )
        return

    load_weights(run.bundle.files, engine.unwrapped, path / "model", engine.device)
    reason = run.patience.reason if run.patience.is_over else f"the best {run.patience.metric}"
    say("best", f"model/ has the weights of step {best_step}: {reason}")


def write_model(run: Run, engine: Engine) -> None:
    """Write the finished model as a folder that Hugging Face loads."""
    model = engine.unwrapped
    files = run.bundle.files
    target = run.folder / "model"
    check_finite(model, engine)

    def write() -> None:
        if run.saver.team.group is None:
            checkpoint.write_model(target, files, DistributedTensors(files.export_tensors(model)))
            return
        tensors = engine.gatherable(files.tensors(model))
        checkpoint.write_model(
            target, files, tensors, run.saver.team, files.tensor_converter(model)
        )

    _on_writers(run, write)


def wait_for_saves(run: Run) -> None:
    """Wait until no save runs in the background; raise its error, if it had one."""
    _on_writers(run, run.saver.wait)


def _on_writers(run: Run, action: Callable[[], None]) -> None:
    """Run an action on the ranks that write files. An error of one rank is raised on all ranks."""
    team = Team.everyone()
    if run.saver.team.group is None:
        team.on_main(action)
    else:
        team.on_all(action)
