"""torch.compile where it pays: the code of one block, compiled once, serves all blocks of a model."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.console import say
from llmtrain.contract import Batch
from llmtrain.errors import UserError, first_line
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.mesh import block_classes

_WORTH_SECONDS = 300.0  # of updates to come: compiling takes 10 to 60 s, and saves a tenth of them or more
_GAIN = 0.97  # compiled code must take less than this share of the time, or it is dropped
_TRIES = 2


def choose(
    accelerator: Accelerator, model: nn.Module, batch: Batch, passes: int, wanted: str, earlier: bool | None
) -> bool:
    """Whether the blocks of ``model`` are compiled from here on.

    Args:
        batch: a micro-batch, to try it on; weights and gradients stay as they are.
        passes: how many micro-batches a process has before it.
        wanted: ``--torch_compile``.
        earlier: what the run has chosen before. Compiled code rounds in other places, so a run stays with one.

    Raises :class:`UserError` where it was asked for and is not to be had.
    """
    if wanted == "never" or (wanted == "auto" and earlier is False):
        return False
    if wanted == "always" or earlier:
        _compile(model)
        failure = _failure(accelerator, model, batch)
        if failure:
            raise UserError(f"torch.compile does not work here: {failure}. Leave it out: --torch_compile never.")
        return True
    if is_sharded(accelerator) or accelerator.device.type not in ("cpu", "cuda"):  # where it is less mature
        return False
    eager = _seconds(accelerator, model, batch)
    if eager * passes < _WORTH_SECONDS:
        return False
    began = time.monotonic()
    _compile(model)
    failure = _failure(accelerator, model, batch)
    compiled = eager if failure else _seconds(accelerator, model, batch)
    took = f"{time.monotonic() - began:.0f} s of compiling"
    if compiled > _GAIN * eager:
        _uncompile(model)
        say("compile", failure or f"no: {took}, and a micro-batch takes {compiled / eager:.2f}x its time before")
        return False
    say("compile", f"blocks: {took}, and a micro-batch takes {compiled / eager:.2f}x its time before")
    return True


@contextlib.contextmanager
def eager_code(compiled: bool) -> Iterator[None]:
    """Run no compiled code inside: an evaluation has other shapes, for which it would be compiled again."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _blocks(model: nn.Module) -> list[Any]:
    names = block_classes(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def _compile(model: nn.Module) -> None:
    for block in _blocks(model):
        block.compile(dynamic=False)


def _uncompile(model: nn.Module) -> None:
    for block in _blocks(model):
        block._compiled_call_impl = None


def _failure(accelerator: Accelerator, model: nn.Module, batch: Batch) -> str:
    """What went wrong in compiling, on this process or another; empty where nothing did."""
    try:
        _try(accelerator, model, batch)
        mine = ""
    except Exception as error:  # of compilers there are many
        mine = first_line(error)
    failed = accelerator.reduce(torch.tensor(float(bool(mine)), device=accelerator.device), reduction="sum")
    return mine or ("it failed on another process" if failed else "")


def _seconds(accelerator: Accelerator, model: nn.Module, batch: Batch) -> float:
    """That a micro-batch takes, on the slowest process."""
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        _try(accelerator, model, batch)
        best = min(best, time.perf_counter() - began)
    return float(accelerator.gather(torch.tensor([best], device=accelerator.device)).max())


def _try(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Forward and backward, of which nothing is left."""
    with torch.random.fork_rng(), accelerator.no_sync(model):
        nll = model(**batch)
        accelerator.backward(nll * 0.0)
    nll.item()
    for parameter in model.parameters():
        parameter.grad = None
