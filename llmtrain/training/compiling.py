"""torch.compile where it pays: the code of one block, compiled once, serves all blocks of a model."""

import contextlib
import time
import timeit
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.console import say
from llmtrain.contract import Batch
from llmtrain.errors import first_line, require
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.mesh import blocks_of

_WORTH_SECONDS = (
    300.0  # of updates to come: compiling takes 10 to 60 s, and saves a tenth of them or more
)
_GAIN = 0.97  # compiled code must take less than this share of the time, or it is dropped
_TRIES = 2


def choose(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Batch,
    passes: int,
    wanted: str,
    earlier: bool | None,
) -> bool:
    """Return whether the blocks of ``model`` are compiled from here on.

    Args:
        batch: a micro-batch, to try it on; weights and gradients stay as they are.
        passes: micro-batches that a rank has before it.
        wanted: ``--torch_compile``.
        earlier: the run's earlier choice. Compiled code rounds in other places, so a run stays with one.

    Raises :class:`UserError` where compiled code was asked for and does not work.
    """
    if wanted == "never" or (wanted == "auto" and earlier is False):
        return False
    if wanted == "always" or earlier:
        _compile(model)
        failure = _failure(accelerator, model, batch)
        require(
            not failure,
            f"torch.compile does not work here: {failure}. Leave it out: --torch_compile never.",
        )
        return True
    if accelerator.device.type not in ("cpu", "cuda"):  # where it is less mature
        return False
    eager = _seconds(accelerator, model, batch)
    if eager * passes < _WORTH_SECONDS:
        return False
    began = time.monotonic()
    _compile(model)
    failure = _failure(accelerator, model, batch)
    compiled = eager if failure else _seconds(accelerator, model, batch)
    took, gains = f"{time.monotonic() - began:.0f} s of compiling", compiled <= _GAIN * eager
    if not gains:
        for block in blocks_of(model):
            vars(block).pop("forward", None)
    verdict = f"{'blocks' if gains else 'no'}: {took}, and a micro-batch takes {compiled / eager:.2f}x its time before"
    say("compile", failure or verdict)
    return gains


@contextlib.contextmanager
def eager_code(model: nn.Module) -> Iterator[None]:
    """Run no compiled blocks inside: an evaluation has other shapes, for which they would be compiled again."""
    owners = [vars(block) for block in blocks_of(model) if "forward" in vars(block)]
    held = [own.pop("forward") for own in owners]
    try:
        yield
    finally:
        for own, forward in zip(owners, held, strict=True):
            own["forward"] = forward


def _compile(model: nn.Module, backend: str = "inductor") -> None:
    torch._dynamo.config.optimize_ddp = (
        False  # it would split blocks where a bucket of gradients ends
    )
    for block in blocks_of(model):  # without the hooks around it, which are FSDP's
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)


def _failure(accelerator: Accelerator, model: nn.Module, batch: Batch) -> str:
    """Return what went wrong in compiling, on this rank or another; empty where nothing did."""
    mine = ""
    try:
        _try(accelerator, model, batch)
    except Exception as error:  # of compilers there are many
        mine = first_line(error)
    failed = accelerator.reduce(
        torch.tensor(float(bool(mine)), device=accelerator.device), reduction="sum"
    )
    return mine or ("it failed on another process" if failed else "")


def _seconds(accelerator: Accelerator, model: nn.Module, batch: Batch) -> float:
    """Return the seconds per micro-batch on the slowest rank."""
    mine = min(timeit.repeat(lambda: _try(accelerator, model, batch), number=1, repeat=_TRIES))
    return float(accelerator.gather(torch.tensor([mine], device=accelerator.device)).max())


def _try(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Run a forward and a backward pass, and undo what they leave behind."""
    own = [accelerator.device] if accelerator.device.type == "cuda" else []
    # a sharded model would keep whole gradients that were not reduced
    alone = contextlib.nullcontext() if is_sharded(accelerator) else accelerator.no_sync(model)
    with torch.random.fork_rng(own), alone:
        nll = model(**batch)
        accelerator.backward(nll * 0.0)
    nll.item()
    for parameter in model.parameters():
        parameter.grad = None
