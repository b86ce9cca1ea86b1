"""torch.compile where it pays: the code of one block, compiled once, serves all blocks of a model."""

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
# for a run with fewer seconds of steps to come.
_WORTH_SECONDS = 300.0
_GAIN = 0.97  # compiled code is dropped unless it takes less than this share of the time
_TRIES = 2

# Compilers are less mature for other devices.
_DEVICES = ("cpu", "cuda")


def choose_compiled_or_eager(
    engine: Engine,
    batch: Batch,
    passes: int,
    wanted: str,
    earlier: bool | None,
) -> bool:
    """Compile the blocks of the model if that is wanted, or if it pays; return whether they are.

    All ranks call this, and all of them compile or none does.

    Args:
        engine: how this process computes, with the model.
        batch: a micro-batch, to try the model on. Weights and gradients stay as they are.
        passes: micro-batches that this rank has still to compute.
        wanted: ``--torch_compile``.
        earlier: the choice of an earlier start of this run. Compiled code rounds differently, so a
            run keeps its choice.

    Raises:
        UserError: compiled code was asked for, and does not work.
    """
    _check_can_compile(engine, wanted)
    if wanted == "never" or (wanted == "auto" and earlier is False):
        return False
    if engine.blocks_communicate:
        if earlier:
            say("compile", "no: blocks communicate under tensor parallelism")
        return False

    if wanted == "always" or earlier:
        failure = _compile_everywhere(engine, batch)
        if failure:
            raise UserError(
                f"torch.compile does not work here: {failure}. Leave it out: --torch_compile never."
            )
        return True

    if engine.device.type not in _DEVICES:
        return False
    return _compile_if_it_pays(engine, batch, passes)


def _compile_if_it_pays(engine: Engine, batch: Batch, passes: int) -> bool:
    """Compile the blocks in a long run, and keep that if a trial gains by it."""
    eager_seconds = _seconds(engine, batch)
    if eager_seconds * passes < _WORTH_SECONDS:
        return False

    start = time.monotonic()
    failure = _compile_everywhere(engine, batch)
    if failure:
        _drop_compiled_code(engine.model)
        say("compile", failure)
        return False

    compiled_seconds = _seconds(engine, batch)
    gains = compiled_seconds <= _GAIN * eager_seconds
    if not gains:
        _drop_compiled_code(engine.model)
    say(
        "compile",
        f"{'blocks' if gains else 'no'}: {time.monotonic() - start:.0f} s of compiling, and a "
        f"micro-batch takes {compiled_seconds / eager_seconds:.2f}x its time before",
    )
    return gains


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


def _check_can_compile(engine: Engine, wanted: str) -> None:
    if wanted == "always" and engine.blocks_communicate:
        raise UserError(
            "--torch_compile always: blocks communicate under tensor parallelism, and are not "
            "compiled; leave it out."
        )


def _compile_everywhere(engine: Engine, batch: Batch) -> str:
    """Compile the blocks on all ranks, or on none if one of them fails; return what went wrong.

    The result is the same on every rank, and empty if nothing went wrong.
    """
    if engine.is_sharded:
        # A rank that failed in a pass through the whole model would leave the others waiting for
        # its shards. So each rank first tries the blocks alone.
        failure = _failure_anywhere(engine, _error_of_blocks(engine, batch))
        if failure:
            return failure

    _compile(engine.model)
    error = ""
    try:
        _try(engine, batch)
    except Exception as problem:  # each compiler has errors of its own
        error = first_line(problem)
    return _failure_anywhere(engine, error)


def _compile(model: nn.Module, backend: str = "inductor") -> None:
    """Let all blocks run compiled code, which is compiled at the first call."""
    # Else DDP would split a block at the end of a bucket of gradients.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks_of(model):
        # Hooks around `forward`, such as those of FSDP, are not compiled.
        block.forward = _compiled(block.forward, backend)


def _compiled(forward: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, backend=backend, dynamic=False)
    return compiled


def _drop_compiled_code(model: nn.Module) -> None:
    for block in blocks_of(model):
        vars(block).pop("forward", None)


def _failure_anywhere(engine: Engine, error: str) -> str:
    """Return the first error of all ranks, with the rank it is from; empty if there is none."""
    errors: list[str] = gather_object([error])
    if engine.world_size == 1:
        return error
    failures = [f"process {rank}: {error}" for rank, error in enumerate(errors) if error]
    return failures[0] if failures else ""


def _seconds(engine: Engine, batch: Batch) -> float:
    """Return the seconds per micro-batch on the slowest rank."""
    seconds = min(timeit.repeat(lambda: _try(engine, batch), number=1, repeat=_TRIES))
    return max(engine.gather_numbers({"seconds": seconds})["seconds"])


def _try(engine: Engine, batch: Batch) -> None:
    """Run a forward and a backward pass, and undo what they leave behind."""
    # Without reducing them, a sharded model would keep whole gradients.
    unsynced = contextlib.nullcontext() if engine.is_sharded else engine.no_sync()
    with engine.fork_rng(), unsynced:
        loss = engine.loss(batch).loss
        engine.accelerator.backward(loss * 0.0)
    loss.item()
    for parameter in engine.model.parameters():
        parameter.grad = None


# --- blocks of a sharded model, tried by each rank alone


@dataclass
class _Call:
    """The arguments of a block's ``forward``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def detached(self) -> "_Call":
        """Return the call with tensors that belong to no graph, and need a gradient as before."""

        def detach(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().requires_grad_(tensor.requires_grad)

        args, kwargs = tree_map_only(torch.Tensor, detach, (self.args, self.kwargs))
        return _Call(args, kwargs)


def _error_of_blocks(engine: Engine, batch: Batch) -> str:
    """Compile each block of a sharded model and try it on this rank alone; return the first error.

    All ranks call this. They meet only in passes that run no compiled code, and where the weights
    of a block are gathered, which a rank does even after an error.
    """
    calls = _calls_of_blocks(engine, batch)
    error = ""
    for block, call in calls.items():
        _unshard(block)
        if not error:
            try:
                _try_alone(engine, block, call)
            except Exception as problem:  # each compiler has errors of its own
                error = first_line(problem)
        reshard(block)
    return error


def _calls_of_blocks(engine: Engine, batch: Batch) -> dict[nn.Module, _Call]:
    """Return how each block of a model is called in a pass over a micro-batch."""
    calls: dict[nn.Module, _Call] = {}

    def note_call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block] = _Call(args, kwargs).detached()

    with contextlib.ExitStack() as hooks:
        for block in blocks_of(engine.model):
            hooks.enter_context(block.register_forward_pre_hook(note_call, with_kwargs=True))
        _try(engine, batch)
    return calls


def _unshard(block: nn.Module) -> None:
    """Gather the weights of a block, and of units of FSDP inside of it."""
    for module in block.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _try_alone(engine: Engine, block: nn.Module, call: _Call) -> None:
    """Compile a block whose weights are gathered, and run it forward and backward."""
    plain = _without_fsdp(block)
    compiled = _compiled(plain.forward)
    with engine.fork_rng(), engine.accelerator.autocast():
        result = compiled(*call.args, **call.kwargs)

    inputs = _with_gradient([call.args, call.kwargs, *plain.parameters()])
    outputs = _with_gradient(result)
    if inputs and outputs:
        # Unlike backward(), this leaves no gradients in the parameters.
        torch.autograd.grad(
            outputs,
            inputs,
            grad_outputs=[torch.zeros_like(output) for output in outputs],
            allow_unused=True,
        )


def _with_gradient(tree: object) -> list[torch.Tensor]:
    """Return the tensors of nested containers that need a gradient."""
    return [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _without_fsdp(module: nn.Module, is_block: bool = True) -> nn.Module:
    """Return a module with the class and the tensors of ``module``, without the hooks of FSDP.

    They would free the weights of a unit, and gather them again in the backward pass. The class
    stays, because compiled code serves modules of one class: the run uses what is compiled here.
    """
    plain: nn.Module = object.__new__(type(module))
    vars(plain).update(vars(module))
    vars(plain)["_modules"] = {
        name: None if child is None else _without_fsdp(child, is_block=False)
        for name, child in module._modules.items()
    }
    if isinstance(module, FSDPModule):
        for name in _HOOKS:
            vars(plain)[name] = OrderedDict()
        if not is_block:
            # A compiler stops at the hooks of FSDP. Let it stop here too, to make the same pieces.
            plain.register_forward_pre_hook(_no_hook)
            plain.register_forward_hook(_no_hook)
    return plain


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _no_hook(*_: object) -> None:
    """Do nothing, in the place of a hook of FSDP."""
    torch._dynamo.graph_break()
