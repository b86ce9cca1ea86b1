"""Activations of a forward and a backward pass, counted on tensors that have a shape and no memory.

The passes are made on torch's ``FakeTensor``: the model's own code says what it keeps, not a rule of thumb.
"""

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from llmtrain.models import attention
from llmtrain.models.gpt import GPT
from llmtrain.parallel.mesh import block_classes
from llmtrain.parallel.tensor import cut_tensors

_BLOCKS = 4  # a model of more is computed with these, and all others are like them


class MicroBatch(NamedTuple):
    """The shape of a micro-batch, and how a model computes it."""

    rows: int
    positions: int  # of each
    bf16: bool = False
    gathered: frozenset[str] = frozenset()  # weights that FSDP2 gathers in bfloat16; autocast casts and keeps others
    fused: bool = False  # attention is a GPU's, which keeps no probabilities
    mesh: DeviceMesh | None = None  # matrices are sharded over it


class Kept(NamedTuple):
    """Bytes of a micro-batch. Each of a model's blocks keeps as many as another."""

    before: float  # kept by what stands before the blocks
    block: float  # kept by one of them
    activations: float  # at the fullest moment until the first block's backward
    logits: float  # at the same moment
    most_after: float  # at the fullest moment after it, when the blocks' activations are gone
    blocks: int

    def peak(self) -> tuple[float, float]:
        """Bytes of activations, and of what belongs to the logits, at the fullest moment."""
        before = self.activations, self.logits
        return before if sum(before) >= self.most_after else (self.most_after, 0)


class Moments(NamedTuple):
    """Bytes of activations at three moments of a micro-batch."""

    at_loss: tuple[float, float]  # and, apart, what belongs to the logits
    after_block: float  # when one block's backward pass is over
    at_end: float  # of the backward pass


def kept(model: nn.Module, batch: MicroBatch) -> Kept:
    """Count what a micro-batch keeps in a model whose parameters are on the meta device."""
    blocks = list_of_blocks(model)
    count = len(blocks) if blocks is not None else 1
    here = min(count, _BLOCKS)
    live = _pass(_of_depth(model, here), batch, to_the_end=True)
    after_blocks = live.most["activations"] if live.after_blocks is None else live.after_blocks
    block = 0.0
    if here > 1:
        fewer = _pass(_of_depth(model, here // 2), batch, to_the_end=False)
        block = (after_blocks - (fewer.after_blocks or 0)) / (here - here // 2)
    activations = live.most["activations"] + block * (count - here)
    return Kept(after_blocks - block * here, block, activations, live.most["logits"], live.most_after, count)


def list_of_blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the one list that holds all of a model's blocks; ``None`` where they stand otherwise."""
    names = block_classes(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and {type(b).__name__ for b in m} <= names]
    return lists[0] if len(lists) == 1 and len(lists[0]) > 0 else None


def _pass(model: nn.Module, batch: MicroBatch, to_the_end: bool) -> "_Live":
    """Make a forward and a backward pass; or, not ``to_the_end``, a forward pass as far as the last block."""
    if batch.mesh is not None:
        cut_tensors(model, batch.mesh)
    with FakeTensorMode(allow_non_fake_inputs=True), _whole_rows(batch.fused):
        _make_fake(model, batch.gathered)
        model.train()
        ids = torch.zeros(batch.rows, batch.positions + 1, dtype=torch.int64)
        labels = ids.clone()
        with _Live(model, to_the_end) as live:
            with contextlib.suppress(_EnoughError), torch.autocast("cpu", torch.bfloat16, enabled=batch.bf16):
                nll = model(input_ids=ids, labels=labels)
            if to_the_end:
                nll.backward()
    return live


class _EnoughError(Exception):
    """The last block's forward pass is over, and no more is asked."""


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, apart from weights and gradients."""

    def __init__(self, model: nn.Module, to_the_end: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.to_the_end = to_the_end
        self.kind = "activations"
        self.bytes: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_after = 0
        self.after_blocks: int | None = None
        self.blocks_are_gone = False
        self._known = {_storage(tensor)._cdata: ("weights", 0) for tensor in [*model.parameters(), *model.buffers()]}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)  # type: ignore[no-untyped-call]
        blocks = list_of_blocks(model)
        if blocks is not None:
            blocks[0].register_forward_hook(self._first_block)
            blocks[-1].register_forward_hook(self._last_block)

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._see(_storage(tensor))
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = self.kind, size
        weakref.finalize(storage, self._forget, key)
        self.bytes[self.kind] += size
        total = self.bytes.total()
        if self.blocks_are_gone:
            self.most_after = max(self.most_after, total)
        elif total > self.most.total():
            self.most = self.bytes.copy()

    def _forget(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self.bytes[kind] -= size

    def _is_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key = _storage(parameter.grad)._cdata
        kind, size = self._known.get(key, ("weights", 0))
        self.bytes[kind] -= size
        self._known[key] = "weights", 0

    def _first_block(self, _: nn.Module, __: object, out: "_Hidden") -> None:
        """After its backward pass has begun, there are no more than one block's activations."""
        if self.after_blocks is None and _first(out).requires_grad:
            _on_gradient(out, lambda: setattr(self, "blocks_are_gone", True))

    def _last_block(self, _: nn.Module, __: object, out: "_Hidden") -> None:
        """The head makes what comes between this block's forward and its backward pass."""
        if self.after_blocks is not None:  # activations are computed again
            return
        self.after_blocks, self.kind = self.bytes.total(), "logits"
        if not self.to_the_end:
            raise _EnoughError
        _on_gradient(out, lambda: setattr(self, "kind", "activations"))


_Hidden = torch.Tensor | tuple[torch.Tensor, ...]  # that a block returns


def _first(out: _Hidden) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _on_gradient(out: _Hidden, act: Callable[[], None]) -> None:
    _first(out).register_hook(lambda _: act())  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _of_depth(model: nn.Module, depth: int) -> nn.Module:
    """Copy a model with its first ``depth`` blocks."""
    shallow = copy.deepcopy(model)
    blocks = list_of_blocks(shallow)
    if blocks is None:
        return shallow
    del blocks[depth:]
    if isinstance(shallow, GPT):
        shallow.config.n_layer = depth
        shallow.keep(0, 1)
    elif isinstance(shallow, PreTrainedModel):
        shallow.config.get_text_config().num_hidden_layers = depth
    return shallow


def _make_fake(model: nn.Module, gathered: frozenset[str]) -> None:
    """Put fake tensors in place of parameters and buffers; ties stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        owner, _, key = name.rpartition(".")
        if parameter not in made:
            half = name in gathered and parameter.is_floating_point()
            fake = _fake(parameter, torch.bfloat16 if half else parameter.dtype)
            made[parameter] = nn.Parameter(fake, parameter.requires_grad)
        model.get_submodule(owner).register_parameter(key, made[parameter])
    for name, buffer in [*model.named_buffers(remove_duplicate=False)]:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, _fake(buffer, buffer.dtype))


def _fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=dtype)
    local, kind = torch.empty(tensor.to_local().shape, dtype=dtype), (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(local, *kind, shape=tensor.shape, stride=tensor.stride(), run_check=False)


@contextlib.contextmanager
def _whole_rows(fused: bool) -> Iterator[None]:
    """Compute rows of one document, for there are no values by which to find several; ``fused`` with a GPU's attention,
    where a CPU's keeps probabilities for rows up to some length."""
    masks = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as changed:
        if hasattr(masks, "find_packed_sequence_indices"):
            changed.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", return_value=None))
        if fused:
            changed.enter_context(mock.patch.object(attention, "LONGEST", 0))
        yield
