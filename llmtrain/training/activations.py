"""Count the bytes of activations, on tensors that have a shape and no memory.

The forward and the backward pass run on torch's ``FakeTensor``. The model's own code decides what
is kept for the backward pass, so this needs no rule of thumb.
"""

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import RecomputesBlocks, block_classes
from llmtrain.interfaces.objective import LossSums, Objective
from llmtrain.models import attention_cpu, loss
from llmtrain.models.gpt import GPT, LayerNorm

# A deeper model is computed with this many blocks. Each further block keeps as much as these.
_MAX_BLOCKS = 4


class MicroBatch(NamedTuple):
    """The shape of a micro-batch, and how a model computes it.

    Attributes:
        rows: rows of the micro-batch.
        positions: positions of each row.
        bf16: compute under autocast in bfloat16.
        weights_in_bf16: names of the weights that are in bfloat16 when they are used, because they
            are trained in it, or because FSDP2 gathers them in it. Autocast casts all other
            weights, and keeps the copies.
        on_gpu: whether a GPU computes. Its attention keeps no probabilities, and it computes more
            logits at a time than a CPU.
        recomputes: whether all blocks recompute their activations in the backward pass, or
            none does; ``None``: those that the model was built to recompute.
        extra: further columns of the rows: the name, the dtype and the shape of each.
    """

    rows: int
    positions: int
    bf16: bool = False
    weights_in_bf16: frozenset[str] = frozenset()
    on_gpu: bool = False
    recomputes: bool | None = None
    extra: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


class PeakBytes(NamedTuple):
    """Bytes of a process at the peak of its memory use.

    Attributes:
        activations: everything but the logits.
        logits: what the head makes between the forward and the backward pass of the last block.
    """

    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.activations + self.logits


class ActivationBytes(NamedTuple):
    """Bytes that a micro-batch keeps.

    Attributes:
        before_blocks: kept by the layers before the first block.
        per_block: kept by one block, in the mean of all blocks.
        peak: the most before the first block's backward pass.
        end_of_backward: the most from the first block's backward pass on. By then, the other blocks
            have freed theirs.
        blocks: the number of blocks.
        in_frozen: the most while frozen models compute, which is before the forward pass.
    """

    before_blocks: float
    per_block: float
    peak: PeakBytes
    end_of_backward: float
    blocks: int
    in_frozen: float = 0.0

    @property
    def in_first_block(self) -> float:
        """Bytes when the first block's backward pass begins."""
        return self.before_blocks + self.per_block * (self.blocks - 1)

    @property
    def highest(self) -> PeakBytes:
        """The bytes at the peak of the whole micro-batch."""
        if self.peak.total < self.end_of_backward:
            return PeakBytes(activations=self.end_of_backward, logits=0)
        return self.peak


def count_activations(
    model: nn.Module,
    objective: Objective,
    batch: MicroBatch,
    frozen: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ActivationBytes:
    """Count what a micro-batch keeps in a model, on the meta device or not.

    Only the first few blocks of a deep model are computed. All others keep as much as these.

    Args:
        model: the model, which stays as it is.
        objective: the loss that is minimised.
        batch: the shape of the micro-batch.
        frozen: further models by name, which the objective may run.
    """
    blocks = list_of_blocks(model)
    block_count = 1 if blocks is None else len(blocks)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    shallow_model = _fake_copy(
        model, fake_mode, min(block_count, _MAX_BLOCKS), weights_in_bf16=batch.weights_in_bf16
    )
    if batch.recomputes is not None and isinstance(shallow_model, RecomputesBlocks):
        shallow_model.recompute_blocks(batch.recomputes)
    # Without gradients a block keeps nothing, so the first few need as much as all.
    shallow_frozen = {
        name: _fake_copy(model, fake_mode, _MAX_BLOCKS, weights_in_bf16=frozenset()).eval()
        for name, model in frozen.items()
    }

    with fake_mode, _as_on_device(batch.on_gpu):
        ids = torch.zeros(batch.rows, batch.positions + 1, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        for name, dtype, shape in batch.extra:
            inputs[name] = torch.zeros(batch.rows, *shape, dtype=getattr(torch, dtype))
        engine = _FakeEngine(shallow_model, shallow_frozen, batch.bf16)
        with _LiveBytes(shallow_model, *shallow_frozen.values()) as counter:
            torch.autograd.backward(engine.loss(objective, inputs))

    after_block = counter.after_block or [counter.peak["activations"]]
    computed_blocks = len(after_block)

    # The growth over the second half of the blocks leaves out what is made once, before the first.
    per_block = 0.0
    half = len(counter.after_block) // 2
    if half:
        per_block = (after_block[-1] - after_block[half - 1]) / (computed_blocks - half)

    peak = PeakBytes(
        activations=counter.peak["activations"] + per_block * (block_count - computed_blocks),
        logits=counter.peak["logits"],
    )
    return ActivationBytes(
        before_blocks=after_block[-1] - per_block * computed_blocks,
        per_block=per_block,
        peak=peak,
        end_of_backward=counter.end_of_backward,
        blocks=block_count,
        in_frozen=counter.in_frozen,
    )


class _FakeEngine:
    """Computes the loss of a micro-batch as an engine does, with models of fake tensors."""

    def __init__(self, model: nn.Module, frozen: Mapping[str, nn.Module], bf16: bool) -> None:
        self.model = model
        self._frozen = frozen
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)

    def frozen(self, name: str, function: Callable[[Any, Batch], Any], inputs: Batch) -> Any:
        with torch.no_grad(), self._autocast:
            return self._frozen[name](**inputs, compute=function)

    def loss(self, objective: Objective, inputs: Batch) -> torch.Tensor:
        frozen_inputs = objective.frozen_inputs(self, inputs)
        with self._autocast:
            sums: LossSums = self.model(
                **inputs,
                compute=lambda model, batch: objective.loss(model, batch | frozen_inputs, extra={}),
            )
        return sums.loss


def list_of_blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the ``nn.ModuleList`` that holds all blocks of a model, if there is one."""
    class_names = block_classes(model)
    block_lists = []
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            element_names = {type(module).__name__ for module in modules}
            if element_names <= class_names:
                block_lists.append(modules)
    if len(block_lists) != 1 or len(block_lists[0]) == 0:
        return None
    return block_lists[0]


# The kind and the bytes of a storage that is counted elsewhere: weights and gradients.
_NOT_COUNTED = ("weights", 0)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, apart from weights and gradients.

    Attributes:
        in_frozen: the most bytes before the forward pass, when frozen models compute.
        peak: bytes by kind at the peak between there and the first block's backward pass.
        end_of_backward: the most bytes from the first block's backward pass on.
        after_block: bytes at the end of each block's forward pass.
    """

    def __init__(self, model: nn.Module, *frozen: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_frozen = 0
        self.peak: Counter[str] = Counter()
        self.end_of_backward = 0
        self.after_block: list[int] = []

        self._moment = ""  # "logits", between the passes of the last block; or "first block"
        self._bytes: Counter[str] = Counter()
        # What each storage has added: the kind, and bytes.
        self._counted: dict[int, tuple[str, int]] = {}
        for module in (model, *frozen):
            for tensor in [*module.parameters(), *module.buffers()]:
                self._counted[tensor.untyped_storage()._cdata] = _NOT_COUNTED

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._stop_counting_gradient
                )
        model.register_forward_pre_hook(self._on_forward)
        self._weight_shapes = {parameter.shape for parameter in model.parameters()}
        self._blocks = list_of_blocks(model) or ()
        for block in self._blocks:
            block.register_forward_hook(self._on_block_end)

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: JsonObject | None = None,
    ) -> object:
        # Autograd adds up the gradients of a tied weight in place, but not on fake tensors.
        is_sum = function is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
        if is_sum and getattr(args[0], "shape", None) in self._weight_shapes:
            return args[0]
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it has been counted, until it is freed."""
        key = storage._cdata
        if key in self._counted:
            return

        kind = "logits" if self._moment == "logits" else "activations"
        size = storage.nbytes()
        self._counted[key] = (kind, size)
        weakref.finalize(storage, self._on_free, key)

        self._bytes[kind] += size
        total = self._bytes.total()
        if self._moment == "first block":
            self.end_of_backward = max(self.end_of_backward, total)
        elif total > self.peak.total():
            self.peak = self._bytes.copy()

    def _on_forward(self, model: nn.Module, args: object) -> None:
        """Begin to look for the peak again, because frozen models have computed by now."""
        self.in_frozen = self.peak.total()
        self.peak = Counter()

    def _on_free(self, key: int) -> None:
        kind, size = self._counted.pop(key)
        self._bytes[kind] -= size

    def _stop_counting_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        kind, size = self._counted.get(key, _NOT_COUNTED)
        self._bytes[kind] -= size
        self._counted[key] = _NOT_COUNTED

    def _on_block_end(
        self,
        block: nn.Module,
        args: object,
        output: torch.Tensor | tuple[torch.Tensor, ...],
    ) -> None:
        """Follow the forward pass of a block, and watch for its backward pass."""
        if len(self.after_block) == len(self._blocks):
            return  # gradient checkpointing computes the block again

        self.after_block.append(self._bytes.total())
        hidden = output[0] if isinstance(output, tuple) else output

        # From here to the last block's backward pass, new tensors belong to the logits.
        if len(self.after_block) == len(self._blocks):
            self._moment = "logits"
            self._begin_with_gradient(hidden, "backward")
        # The first block is the last one in the backward pass.
        if len(self.after_block) == 1 and hidden.requires_grad:
            self._begin_with_gradient(hidden, "first block")

    def _begin_with_gradient(self, hidden: torch.Tensor, moment: str) -> None:
        """Note that a moment begins when the gradient of a block's output is there."""

        def begin(gradient: torch.Tensor) -> None:
            self._moment = moment

        hidden.register_hook(begin)  # type: ignore[no-untyped-call]


def _fake_copy(
    model: nn.Module, fake_mode: FakeTensorMode, depth: int, weights_in_bf16: frozenset[str]
) -> nn.Module:
    """Return a copy of a model on fake tensors, in training mode, with its first ``depth`` blocks.

    Tied parameters stay tied.
    """
    blocks = list_of_blocks(model)
    further_blocks = [] if blocks is None else [*blocks[depth:]]

    # What stands for a part of the model in the copy.
    no_block = nn.Identity()
    copies: dict[int, object] = {id(block): no_block for block in further_blocks}
    with fake_mode:
        for name, parameter in model.named_parameters():
            is_cast = name in weights_in_bf16 and parameter.is_floating_point()
            dtype = torch.bfloat16 if is_cast else parameter.dtype
            fake = torch.empty(parameter.shape, dtype=dtype)
            copies[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
        for buffer in model.buffers():
            copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    shallow = copy.deepcopy(model, copies).train()
    if not further_blocks:
        return shallow

    for module in shallow.modules():
        if isinstance(module, nn.ModuleList) and no_block in [*module]:
            del module[depth:]
    config: Any = getattr(shallow, "config", None)
    if isinstance(shallow, GPT):
        config.n_layer = depth
    elif hasattr(config, "get_text_config"):  # a model of transformers
        config.get_text_config().num_hidden_layers = depth
    return shallow


@contextlib.contextmanager
def _as_on_device(on_gpu: bool) -> Iterator[None]:
    """Compute as the device of the run does, and as if every row were one document.

    Fake tensors have no values by which a model could tell documents apart.

    Args:
        on_gpu: compute as a GPU does. A CPU's attention keeps probabilities, for rows up to some
            length, and its loss computes fewer logits at a time.
    """
    masks = sys.modules.get("transformers.masking_utils")
    experts = sys.modules.get("transformers.integrations.moe")

    with contextlib.ExitStack() as patches:
        if hasattr(masks, "find_packed_sequence_indices"):
            patches.enter_context(
                mock.patch.object(masks, "find_packed_sequence_indices", return_value=None)
            )
        # The grouped product of torch has no shape inference for float32.
        if hasattr(experts, "_can_use_grouped_mm"):
            patches.enter_context(
                mock.patch.object(experts, "_can_use_grouped_mm", return_value=False)
            )
        if on_gpu:
            patches.enter_context(mock.patch.object(attention_cpu, "MAX_LENGTH", 0))
            for limits in (loss.CHUNK_LOGITS, loss.TILE_LOGITS):
                patches.enter_context(mock.patch.dict(limits, cpu=limits["cuda"]))
            patches.enter_context(mock.patch.object(LayerNorm, "forward", nn.LayerNorm.forward))
        yield
