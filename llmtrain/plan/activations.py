"""Activations of a forward and a backward pass, counted on tensors that have a shape and no memory.

The passes are made on torch's ``FakeTensor``: the model's own code says what it keeps, not a rule of thumb.
"""

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from llmtrain.models import attention_cpu
from llmtrain.models.gpt import GPT
from llmtrain.parallel.blocks import block_classes
from llmtrain.parallel.shards import to_local
from llmtrain.parallel.tensor import parallelize
from llmtrain.types import Facts, Objective

Pair: TypeAlias = tuple[float, float]  # bytes of activations, and of logits
_BLOCKS = 4  # a model of more is computed with these, and all others are like them


class MicroBatch(NamedTuple):
    """The shape of a micro-batch, and how a model computes it."""

    rows: int
    positions: int  # of each
    bf16: bool = False
    gathered: frozenset[str] = (
        frozenset()
    )  # weights that FSDP2 gathers in bfloat16; autocast casts and keeps others
    fused: bool = False  # attention is a GPU's, which keeps no probabilities
    mesh: DeviceMesh | None = None  # matrices are sharded over it


class Kept(NamedTuple):
    """Bytes of a micro-batch. Each of a model's blocks keeps as many as another."""

    before: float  # kept by what stands before the blocks
    block: float  # kept by one of them
    peak: Pair  # activations, and what belongs to the logits, at the fullest moment
    at_end: float  # at the fullest moment of the first block's backward and after, when the others' are gone
    blocks: int


def kept(model: nn.Module, objective: Objective, batch: MicroBatch) -> Kept:
    """Count what a micro-batch keeps in a model whose parameters are on the meta device.

    A model of many blocks is computed with a few of them. All others keep as much as these.

    Args:
        model: the model, which stays as it is.
        objective: what is minimised.
        batch: the shape of the micro-batch.
    """
    blocks = list_of_blocks(model)
    block_count = len(blocks) if blocks is not None else 1
    shallow_model = _of_depth(model, min(block_count, _BLOCKS))
    if batch.mesh is not None:
        parallelize(shallow_model, batch.mesh)

    live = _count_live_bytes(shallow_model, objective, batch)
    after_block = live.after_block or [live.most["activations"]]
    computed_blocks = len(after_block)

    # The second half of the blocks: what is made once, before the first block, is not counted.
    block = 0.0
    half = len(live.after_block) // 2
    if half:
        block = (after_block[-1] - after_block[half - 1]) / (computed_blocks - half)

    activations = live.most["activations"] + block * (block_count - computed_blocks)
    peak = (activations, live.most["logits"])
    if sum(peak) < live.at_end:
        peak = (live.at_end, 0)
    return Kept(
        before=after_block[-1] - block * computed_blocks,
        block=block,
        peak=peak,
        at_end=live.at_end,
        blocks=block_count,
    )


def _count_live_bytes(model: nn.Module, objective: Objective, batch: MicroBatch) -> "_Live":
    """Make a forward and a backward pass without memory, and count the bytes that are alive."""
    with FakeTensorMode(allow_non_fake_inputs=True), _whole_rows(batch.fused):
        _make_fake(model, batch.gathered)
        model.train()
        ids = torch.zeros(batch.rows, batch.positions + 1, dtype=torch.int64)
        labels = ids.clone()
        live = _Live(model)
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=batch.bf16):
                sums = model(
                    input_ids=ids,
                    labels=labels,
                    compute=lambda model, batch: objective.loss(model, batch, extra={}),
                )
            sums.loss.backward()
    return live


def list_of_blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the one list that holds all of a model's blocks; ``None`` where they stand otherwise."""
    names = block_classes(model)
    lists = [
        m
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and {type(b).__name__ for b in m} <= names
    ]
    return lists[0] if len(lists) == 1 and len(lists[0]) > 0 else None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, apart from weights and gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = "activations"
        self.bytes: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.at_end = 0
        self.after_block: list[int] = []  # bytes at the end of each one's forward
        self.blocks_are_gone = False
        self._known = {
            _storage(tensor)._cdata: ("weights", 0)
            for tensor in [*model.parameters(), *model.buffers()]
        }
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)  # type: ignore[no-untyped-call]
        self._blocks = list_of_blocks(model) or ()
        for block in self._blocks:
            block.register_forward_hook(self._after_block)

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        _: object,
        args: tuple[object, ...] = (),
        kwargs: Facts | None = None,
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
            self.at_end = max(self.at_end, total)
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

    def _after_block(
        self, _: nn.Module, __: object, out: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        if len(self.after_block) == len(self._blocks):  # activations are computed again
            return
        self.after_block.append(self.bytes.total())
        hidden = out[0] if isinstance(out, tuple) else out
        if (
            len(self.after_block) == 1 and hidden.requires_grad
        ):  # at its backward no more than one block's are left
            hidden.register_hook(lambda _: setattr(self, "blocks_are_gone", True))  # type: ignore[no-untyped-call]
        if len(self.after_block) == len(
            self._blocks
        ):  # until its backward the head makes what comes
            self.kind = "logits"
            hidden.register_hook(lambda _: setattr(self, "kind", "activations"))  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return to_local(tensor).untyped_storage()


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
    local, kind = (
        torch.empty(tensor.to_local().shape, dtype=dtype),
        (tensor.device_mesh, tensor.placements),
    )
    return DTensor.from_local(
        local, *kind, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


@contextlib.contextmanager
def _whole_rows(fused: bool) -> Iterator[None]:
    """Compute rows of one document, for there are no values by which to find several.

    ``fused`` computes with a GPU's attention; that of a CPU keeps probabilities, for rows up to some length.
    """
    masks, experts = (
        sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "integrations.moe")
    )
    with contextlib.ExitStack() as changed:
        if hasattr(masks, "find_packed_sequence_indices"):
            changed.enter_context(
                mock.patch.object(masks, "find_packed_sequence_indices", return_value=None)
            )
        if hasattr(experts, "_can_use_grouped_mm"):  # torch's has no shape inference for float32
            changed.enter_context(
                mock.patch.object(experts, "_can_use_grouped_mm", return_value=False)
            )
        if fused:
            changed.enter_context(mock.patch.object(attention_cpu, "MAX_LENGTH", 0))
        yield
