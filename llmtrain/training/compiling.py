"""Compile the blocks of a model if that makes training faster.

The blocks of a model run the same code, so torch.compile compiles it once for all of them.
"""

import contextlib
import time
import timeit
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.parallel.blocks import blocks_of, reshard
from llmtrain.parallel.engine import Engine
from llmtrain.types import Batch

# Compiling takes 10 to 60 seconds and saves a tenth of the time or more. It is not worth trying
# for a run with fewer seconds of steps to come, for each shape that is compiled.
_MIN_REMAINING_SECONDS = 300.0
# Compiled code is kept if it takes at most this share of the time of eager code.
_MAX_TIME_RATIO = 0.97
_TRIALS = 2

# Compilers are less mature for other devices.
_DEVICES = ("cpu", "cuda")

# Where torch.nn.Module keeps the hooks of a module.
_HOOK_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def choose_compiled_or_eager(
    engine: Engine,
    batch: Batch,
    passes: int,
    mode: str,
    earlier_choice: bool | None,
    shapes: int = 1,
) -> bool:
    """Compile the blocks of the model if the user asks for it, or if a trial is faster.

    All ranks call this, and all of them compile or none does.

    Args:
        engine: how this process computes, with the model.
        batch: a micro-batch, to try the model on. Weights and gradients stay as they are.
        passes: micro-batches that this rank has still to compute.
        mode: ``--torch_compile``: ``always``, ``never`` or ``auto``.
        earlier_choice: the result for an earlier start of this run, if there was one. Compiled code
            rounds differently, so a run keeps its choice.
        shapes: the most shapes that micro-batches of this run have.

    Returns:
        Whether the blocks are compiled.

    Raises:
        UserError: if the user asked for compiled code, and it does not work.
    """
    if mode == "never" or (mode == "auto" and earlier_choice is False):
        return False
    if mode == "always" or earlier_choice:
        _allow_shapes(shapes)
        failure = _compile_on_all_ranks(engine, batch)
        if failure:
            raise UserError(
                f"torch.compile does not work here: {failure}; use --torch_compile never."
            )
        return True

    if engine.device.type not in _DEVICES:
        return False
    return _compile_if_faster(engine, batch, passes, shapes)


def _allow_shapes(shapes: int) -> None:
    """Let torch compile a function for that many shapes.

    From the ninth shape on, torch would run eager code for new shapes, which rounds differently.
    The result would then depend on which shapes came first since the last start of the run.
    """
    # A function may also be compiled again for other reasons than its shapes.
    limit = 2 * shapes
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)


def _compile_if_faster(engine: Engine, batch: Batch, passes: int, shapes: int) -> bool:
    """Compile the blocks if the run is long, and keep that if a trial is faster."""
    eager_seconds = _seconds_per_micro_batch(engine, batch)
    if eager_seconds * passes < _MIN_REMAINING_SECONDS * shapes:
        return False

    _allow_shapes(shapes)
    start = time.monotonic()
    failure = _compile_on_all_ranks(engine, batch)
    if failure:
        _drop_compiled_code(engine.model)
        say("compile", f"blocks stay eager: {failure}")
        return False

    compiled_seconds = _seconds_per_micro_batch(engine, batch)
    is_faster = compiled_seconds <= _MAX_TIME_RATIO * eager_seconds
    if not is_faster:
        _drop_compiled_code(engine.model)
    say(
        "compile",
        f"{'blocks are compiled' if is_faster else 'blocks stay eager'}: the trial took "
        f"{time.monotonic() - start:.0f} s, and a micro-batch takes "
        f"{compiled_seconds / eager_seconds:.2f}x its time before",
    )
    return is_faster


@contextlib.contextmanager
def eager_code(model: nn.Module) -> Iterator[None]:
    """Run no compiled blocks inside the context.

    An evaluation has other shapes, for which the blocks would be compiled again.
    """
    compiled = [block for block in blocks_of(model) if "forward" in vars(block)]
    forwards = [vars(block).pop("forward") for block in compiled]
    try:
        yield
    finally:
        for block, forward in zip(compiled, forwards, strict=True):
            vars(block)["forward"] = forward


def _compile_on_all_ranks(engine: Engine, batch: Batch) -> str:
    """Compile the blocks on all ranks, and return the first error of any rank.

    The result is the same on every rank, and empty if there was no error. After an error the
    blocks may be left compiled.
    """
    if engine.is_sharded:
        # A rank that failed in a pass through the full model would leave the others waiting for
        # its shards. So each rank first tries the blocks one by one.
        failure = _first_failure(engine, _error_of_blocks(engine, batch))
        if failure:
            return failure

    _compile(engine.model)
    error = ""
    try:
        _try(engine, batch)
    except Exception as problem:  # each compiler raises its own errors
        error = first_line(problem)
    return _first_failure(engine, error)


def _compile(model: nn.Module, backend: str = "inductor") -> None:
    """Let all blocks run compiled code, which is compiled at the first call."""
    # Otherwise DDP would split a block at the end of a bucket of gradients.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks_of(model):
        # Hooks around `forward`, such as those of FSDP, are not compiled.
        block.forward = _compile_forward(block.forward, backend)


def _compile_forward(forward: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, backend=backend, dynamic=False)
    return compiled


def _drop_compiled_code(model: nn.Module) -> None:
    for block in blocks_of(model):
        vars(block).pop("forward", None)


def _first_failure(engine: Engine, error: str) -> str:
    """Return the first error of all ranks, with the number of its rank; empty if there is none."""
    errors: list[str] = gather_object([error])
    if engine.world_size == 1:
        return error
    for rank, error_of_rank in enumerate(errors):
        if error_of_rank:
            return f"rank {rank}: {error_of_rank}"
    return ""


def _seconds_per_micro_batch(engine: Engine, batch: Batch) -> float:
    """Return the seconds that a forward and a backward pass take on the slowest rank."""
    seconds = min(timeit.repeat(lambda: _try(engine, batch), number=1, repeat=_TRIALS))
    return max(engine.gather_numbers({"seconds": seconds})["seconds"])


def _try(engine: Engine, batch: Batch) -> None:
    """Run a forward and a backward pass, and leave gradients and random generators as before."""
    # A sharded model that reduces no gradients would keep full ones.
    sync_context = contextlib.nullcontext() if engine.is_sharded else engine.no_sync()
    with engine.fork_rng(), sync_context:
        loss = engine.loss(batch).loss
        engine.accelerator.backward(loss * 0.0)
    loss.item()
    for parameter in engine.model.parameters():
        parameter.grad = None


# --- blocks of a sharded model, which each rank tries one by one


@dataclass
class _Call:
    """The arguments of a block's ``forward``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def detached(self) -> "_Call":
        """Return the call with detached tensors that require a gradient if they did before."""

        def detach(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().requires_grad_(tensor.requires_grad)

        args, kwargs = tree_map_only(torch.Tensor, detach, (self.args, self.kwargs))
        return _Call(args, kwargs)


def _error_of_blocks(engine: Engine, batch: Batch) -> str:
    """Compile and run each block of a sharded model on this rank; return the first error.

    All ranks call this. They communicate only in passes that run no compiled code, and to gather
    the weights of a block. A rank takes part in that even after an error.
    """
    calls = _calls_of_blocks(engine, batch)
    error = ""
    for block, call in calls.items():
        _unshard(block)
        if not error:
            try:
                _try_block(engine, block, call)
            except Exception as problem:  # each compiler raises its own errors
                error = first_line(problem)
        reshard(block)
    return error


def _calls_of_blocks(engine: Engine, batch: Batch) -> dict[nn.Module, _Call]:
    """Return the call of each block in a pass over a micro-batch."""
    calls: dict[nn.Module, _Call] = {}

    def note_call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block] = _Call(args, kwargs).detached()

    with contextlib.ExitStack() as hooks:
        for block in blocks_of(engine.model):
            hooks.enter_context(block.register_forward_pre_hook(note_call, with_kwargs=True))
        _try(engine, batch)
    return calls


def _unshard(block: nn.Module) -> None:
    """Gather the weights of a block and of the FSDP units inside it."""
    for module in block.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _try_block(engine: Engine, block: nn.Module, call: _Call) -> None:
    """Compile a block whose weights are gathered, and run it forward and backward."""
    plain = _without_fsdp(block)
    compiled = _compile_forward(plain.forward)
    with engine.fork_rng(), engine.accelerator.autocast():
        result = compiled(*call.args, **call.kwargs)

    inputs = _requiring_grad([call.args, call.kwargs, *plain.parameters()])
    outputs = _requiring_grad(result)
    if inputs and outputs:
        # Unlike backward(), this leaves no gradients in the parameters.
        torch.autograd.grad(
            outputs,
            inputs,
            grad_outputs=[torch.zeros_like(output) for output in outputs],
            allow_unused=True,
        )


def _requiring_grad(tree: object) -> list[torch.Tensor]:
    """Return the tensors of nested containers that require a gradient."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _without_fsdp(module: nn.Module, is_block: bool = True) -> nn.Module:
    """Return a module with the class and the tensors of ``module``, without the hooks of FSDP.

    The hooks would free the weights of a unit, and gather them again in the backward pass. The
    class stays, because all modules of a class share compiled code: the run uses the code that is
    compiled here.
    """
    plain: nn.Module = object.__new__(type(module))
    vars(plain).update(vars(module))

    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _without_fsdp(child, is_block=False)
    vars(plain)["_modules"] = children

    if isinstance(module, FSDPModule):
        for name in _HOOK_ATTRIBUTES:
            vars(plain)[name] = OrderedDict()
        if not is_block:
            # The compiler breaks a graph at hooks of FSDP. Break it here too, for the same graphs.
            plain.register_forward_pre_hook(_break_graph)
            plain.register_forward_hook(_break_graph)
    return plain


def _break_graph(*_: object) -> None:
    """Take the place of a hook of FSDP, and do nothing."""
    torch._dynamo.graph_break()
