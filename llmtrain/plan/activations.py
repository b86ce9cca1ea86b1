"""What a forward and a backward pass hold beside weights and gradients, found by making them on tensors that have a
shape and no memory (torch's FakeTensor): the model's own code says what it keeps, not a rule of thumb.
"""

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.models import attention
from llmtrain.parallel.mesh import block_classes
from llmtrain.parallel.tensor import cut_tensors

_BLOCKS = 4  # a model of more is looked at as if it had these, and all others are like them


class Kept(NamedTuple):
    """Bytes of a micro-batch. Each of a model's blocks keeps as many as another."""

    before: float  # what stands before the blocks keeps
    block: float  # one of them keeps
    most: dict[str, float]  # at the fullest moment until the first block's backward: ``activations`` and ``logits``
    most_after: float  # at the fullest moment after it, when the blocks' are gone
    blocks: int

    def peak(self) -> tuple[float, float]:
        """Of activations, and of what belongs to the logits, at the fullest moment."""
        activations, logits = self.most["activations"], self.most["logits"]
        return (activations, logits) if activations + logits >= self.most_after else (self.most_after, 0)


def kept(
    model: nn.Module,
    rows: int,
    positions: int,
    bf16: bool,
    gathered: frozenset[str] = frozenset(),
    fused: bool = False,
    mesh: DeviceMesh | None = None,
) -> Kept:
    """Of ``rows`` rows of ``positions`` positions through a model whose parameters are on the meta device.

    Weights whose names are in ``gathered`` come in bfloat16, as FSDP2 gathers them; autocast casts others, and keeps
    what it cast. ``fused``: attention is a GPU's, which keeps no probabilities. ``mesh``: matrices are cut over it.
    """
    found = _list_of_blocks(model)
    blocks = len(found) if found is not None else 1
    here = min(blocks, _BLOCKS)
    depths = [here // 2, here] if here > 1 else [here]
    *fewer, live = (
        _pass(_of_depth(model, n), rows, positions, bf16, gathered, fused, mesh, whole=n == here) for n in depths
    )
    most = {"activations": 0.0, "logits": 0.0, **live.most}
    behind = live.after_blocks if live.after_blocks is not None else most["activations"]
    block = (behind - (fewer[0].after_blocks or 0.0)) / (here - here // 2) if fewer else 0.0
    most["activations"] += block * (blocks - here)
    return Kept(behind - block * here, block, most, live.most_after, blocks)


def _pass(
    model: nn.Module,
    rows: int,
    positions: int,
    bf16: bool,
    gathered: frozenset[str],
    fused: bool,
    mesh: DeviceMesh | None,
    whole: bool,
) -> "_Live":
    """Forward and backward; or, of which not the ``whole`` is wanted, as far as the last block's forward."""
    if mesh is not None:
        cut_tensors(model, mesh)
    with FakeTensorMode(allow_non_fake_inputs=True), _whole_rows(fused):
        _make_fake(model, gathered)
        model.train()
        blocks = _list_of_blocks(model)
        ids = torch.zeros(rows, positions + 1, dtype=torch.int64)
        labels = ids.clone()
        live = _Live(model)
        if blocks is not None:
            _watch_ends(live, blocks)
        with live:
            with contextlib.suppress(_Enough), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                live.stop = not whole
                nll = model(input_ids=ids, labels=labels)
            if whole:
                nll.backward()
    return live


class _Enough(Exception):  # noqa: N818
    """What was looked for is known."""


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, apart from weights and gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kind = "activations"
        self.bytes: Counter[str] = Counter()
        self.most: dict[str, float] = {}
        self.most_after = 0.0
        self.after_blocks: float | None = None
        self.is_last_part = self.stop = False
        self._known: dict[int, tuple[str, int]] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            self._known[_storage(tensor)._cdata] = ("weights", 0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = self.kind, size
        weakref.finalize(storage, self._forget, key)
        self.bytes[self.kind] += size
        total = self.bytes.total()
        if self.is_last_part:
            self.most_after = max(self.most_after, total)
        elif total > sum(self.most.values()):
            self.most = dict(self.bytes)

    def _forget(self, key: int) -> None:
        kind, size = self._known.pop(key)
        self.bytes[kind] -= size

    def _is_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key = _storage(parameter.grad)._cdata
        kind, size = self._known.get(key, ("weights", 0))
        self.bytes[kind] -= size
        self._known[key] = "weights", 0


def _storage(tensor: torch.Tensor) -> Any:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _watch_ends(live: _Live, blocks: nn.ModuleList) -> None:
    """What is made between the last block's forward and its backward is the head's; after the first block's backward
    has begun, there are no more than one block's activations."""

    def last(_: Any, __: Any, out: Any) -> None:
        if live.after_blocks is None:  # not where activations are computed again
            live.after_blocks, live.kind = live.bytes.total(), "logits"
            if live.stop:
                raise _Enough
            _first(out).register_hook(lambda _: setattr(live, "kind", "activations"))

    def first(_: Any, __: Any, out: Any) -> None:
        if live.after_blocks is None and _first(out).requires_grad:
            _first(out).register_hook(lambda _: setattr(live, "is_last_part", True))

    blocks[0].register_forward_hook(first)
    blocks[-1].register_forward_hook(last)


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _list_of_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The one list that holds all of a model's blocks; None where they stand otherwise."""
    names = block_classes(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and {type(b).__name__ for b in m} <= names]
    return lists[0] if len(lists) == 1 and len(lists[0]) > 0 else None


def _of_depth(model: nn.Module, depth: int) -> nn.Module:
    shallow = copy.deepcopy(model)
    blocks = _list_of_blocks(shallow)
    if blocks is None:
        return shallow
    del blocks[depth:]
    config: Any = getattr(shallow, "config", None)
    if hasattr(shallow, "keep"):  # the GPT, whose blocks may be on other stages
        config.n_layer = depth
        shallow.keep(0, 1)  # type: ignore[operator]
    elif hasattr(config, "get_text_config"):
        config.get_text_config().num_hidden_layers = depth
    return shallow


def _make_fake(model: nn.Module, gathered: frozenset[str]) -> None:
    made: dict[int, nn.Parameter] = {}  # what is tied stays so
    for prefix, module in model.named_modules():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            name = f"{prefix}.{key}" if prefix else key
            if id(parameter) not in made:
                dtype = torch.bfloat16 if name in gathered and parameter.is_floating_point() else parameter.dtype
                made[id(parameter)] = nn.Parameter(_fake(parameter, dtype), parameter.requires_grad)
            module.register_parameter(key, made[id(parameter)])
        for key, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, key, _fake(buffer, buffer.dtype))


def _fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        local = torch.empty(tensor.to_local().shape, dtype=dtype)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
    return torch.empty(tensor.shape, dtype=dtype)


@contextlib.contextmanager
def _whole_rows(fused: bool) -> Iterator[None]:
    """Rows of one document, as there are no values to find several by; and the attention of a GPU where asked for: that
    of a CPU keeps probabilities, for rows up to some length."""
    masks = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as changed:
        if hasattr(masks, "find_packed_sequence_indices"):
            changed.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", return_value=None))
        if fused:
            changed.enter_context(mock.patch.object(attention, "LONGEST", 0))
        yield
