"""Compile the blocks of a model.

The blocks of a model run the same code, so torch.compile compiles it once for all of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import blocks_of
from llmtrain.parallel.engine import Engine


def compile_blocks(engine: Engine, batch: Batch, shapes: int) -> None:
    """Compile the blocks of the model, in a forward and a backward pass.

    All ranks call this. Weights, gradients and random generators stay as they are. If the compiler
    fails on one rank, that rank ends, and the launcher ends the others.

    Args:
        engine: how this process computes, with the model.
        batch: a micro-batch.
        shapes: the most shapes that micro-batches of this run have.

    Raises:
        UserError: if the compiler fails.
    """
    # From the ninth shape on, torch would run eager code for new shapes, which rounds differently.
    # The result would then depend on which shapes came first since the last start of the run. A
    # function may also be compiled again for other reasons than its shapes.
    limit = max(torch._dynamo.config.recompile_limit, 2 * shapes)
    torch._dynamo.config.recompile_limit = limit
    _compile(engine.model)
    # A sharded model that reduces no gradients would keep full ones.
    sync_context = contextlib.nullcontext() if engine.ranks.is_sharded else engine.no_sync()
    try:
        with engine.fork_rng(), sync_context:
            loss = engine.warm_up_loss(batch)
            engine.accelerator.backward(loss * 0.0)
        loss.item()
    except TorchDynamoException as error:
        raise UserError(
            f"torch.compile does not work here: {first_line(error)}; use --torch_compile never."
        ) from error
    for parameter in engine.model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def eager_code(model: nn.Module) -> Iterator[None]:
    """Run no compiled blocks inside the context.

    An evaluation has other shapes, for which the blocks would be compiled again.
    """
    compiled: dict[nn.Module, Any] = {}
    for block in blocks_of(model):
        forward: Any = vars(block).get("forward")  # which may also be one of the user
        if hasattr(forward, "_torchdynamo_orig_callable"):
            compiled[block] = forward
            block.forward = forward._torchdynamo_orig_callable
    try:
        yield
    finally:
        for block, forward in compiled.items():
            block.forward = forward


def _compile(model: nn.Module, backend: str = "inductor") -> None:
    """Let all blocks run compiled code, which is compiled at the first call."""
    # Otherwise DDP would split a block at the end of a bucket of gradients.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks_of(model):
        # Hooks around `forward`, such as those of FSDP, are not compiled.
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
