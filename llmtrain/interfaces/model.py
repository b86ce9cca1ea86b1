"""A model: what the loss may call on it, how it is stored, and what a recipe has built."""

from __future__ import annotations  # so that annotations do not import torch

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import Objective

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Names and full tensors, one at a time.
Weights: TypeAlias = Iterable[tuple[str, "torch.Tensor"]]
# Takes the name and the value of a tensor in a checkpoint. Returns the tensors, by name, that the
# folder of the finished model has instead.
TensorConverter: TypeAlias = Callable[[str, "torch.Tensor"], dict[str, "torch.Tensor"]]


class Model(Protocol):
    """What an objective or a metric may call on the model.

    Call these methods inside ``forward`` only, as :meth:`llmtrain.Objective.loss` and metrics do:
    DDP, FSDP2 and autocast work nowhere else. Pass them a micro-batch as ``**batch``. Columns that
    a method does not need are ignored. Documents of a packed row do not see each other.

    Shapes: B rows of T tokens, hidden states of C numbers, a vocabulary of V tokens. The last token
    of each row is only a target, so results have T - 1 positions. The target of position t of a row
    is ``labels[:, 1:][:, t]``.
    """

    @property
    def base_model(self) -> nn.Module:
        """The model without its head."""

    def nll(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        """Return the summed negative log-likelihood of the labels, in nats.

        Args:
            input_ids: tokens [B, T].
            labels: tokens [B, T], which are not shifted; -100 is ignored.
            target_positions: int64 [N], which of the flattened targets [B * (T - 1)] count; -1 is
                padding. The sum over all targets is the same, because an ignored one has nll 0.
            per_target: return the nll of each target instead of their sum: [B * (T - 1)], or [N] if
                there are ``target_positions``.
            columns: the other columns of the micro-batch.
        """

    def hidden(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the last hidden states [B, T - 1, C], of which the head makes logits.

        It calls :attr:`base_model`, so hooks there can read something in the layers.
        """

    def logits(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the logits [B, T - 1, V] of all positions, in the precision of the head."""

    def logits_at(self, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return float32 logits [N, V] at some positions.

        Args:
            positions: int64 [N], indices into the flattened positions [B * (T - 1)]. The target of
                position i is ``labels[:, 1:].flatten()[i]``.
            input_ids: tokens [B, T].
            columns: the other columns of the micro-batch.
        """


@runtime_checkable
class HasEmbeddings(Protocol):
    """A model with the methods of transformers that return its embedding and its head."""

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module | None: ...


def block_classes(model: nn.Module) -> set[str]:
    """Return the class names of a model's repeated blocks.

    A model of transformers lists them in ``_no_split_modules``. In any other model, the blocks
    are the elements of its longest ``nn.ModuleList`` that is not inside another one. The result is
    empty if the model has no such list.
    """
    from torch import nn  # not at the top, because recipes import this module to print --help

    declared = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
    present = {type(module).__name__ for module in model.modules()}
    if declared & present:
        return declared & present

    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        is_inside_another = any(name.startswith(f"{outer}.") for outer in lists)
        if not is_inside_another:
            lists[name] = module
    longest = max(lists.values(), key=len, default=())
    return {type(block).__name__ for block in longest}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks, outer blocks before the blocks that they contain."""
    names = block_classes(model)
    return [module for module in model.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class PackingSupport:
    """What rows a model can be trained on.

    Attributes:
        packing_problem: why rows are not packed, for the log; empty if they are.
        shares_prompts: whether two answers can follow one copy of their prompt.
    """

    packing_problem: str = ""
    shares_prompts: bool = False


class ModelFormat(Protocol):
    """How a model is stored: the files of its folder, and the names of its tensors."""

    @property
    def config(self) -> dict[str, Any]:
        """The description of the model in the fingerprint of a run."""

    @property
    def weights_name(self) -> str:
        """The name of the file with the weights, if they are in a single file."""

    @property
    def may_split_weights(self) -> bool:
        """Whether the weights may be split over several files."""

    def trained_in(self, dtype: torch.dtype) -> ModelFormat:
        """Return the format of a model whose weights are trained in another dtype than float32."""

    def finished(self, dtype: str) -> ModelFormat:
        """Return the format of the finished model's folder.

        It may have more tensors than a checkpoint, and its weights may have another dtype.

        Args:
            dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the dtypes of the model that
                training started from.
        """

    def write(self, folder: Path, parameters: int) -> None:
        """Write all files of a model folder except the weights.

        Args:
            folder: the folder.
            parameters: the number of weights.
        """

    def tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a folder by name.

        Those of a checkpoint are the model's own tensors, not copies. Loading it fills them.
        """

    def export_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors in the folder of the finished model, by name."""

    def tensor_converter(self, model: nn.Module) -> TensorConverter:
        """Return the function that converts a checkpoint's tensors to those of a finished model."""


@runtime_checkable
class RecomputesBlocks(Protocol):
    """A model whose blocks may recompute their activations in the backward pass."""

    def recompute_blocks(self, enabled: bool) -> None:
        """Let all blocks do so, or none."""


def can_recompute(model: nn.Module) -> bool:
    """Return whether blocks of a model can recompute their activations."""
    is_supported = getattr(model, "supports_gradient_checkpointing", True)  # of transformers
    return isinstance(model, RecomputesBlocks) and bool(is_supported)


class Recomputation(NamedTuple):
    """Whether the blocks of a model recompute their activations in the backward pass.

    Attributes:
        enabled: whether all blocks do; otherwise none does.
        reason: why, for the start-up log; empty if the flags say so.
    """

    enabled: bool
    reason: str = ""


@dataclass
class ModelBundle:
    """A model that a recipe has built, with its weights, files and objective.

    Attributes:
        model: the model. Its parameters may be on the meta device until it is placed.
        files: how the model is stored. Without it, :func:`llmtrain.place` adds files that
            describe a plain torch module.
        weights: the initial weights of parameters on the meta device. Other parameters have theirs.
        start: where the weights came from, for the fingerprint of a run.
        check: called when the model has its weights. It raises UserError if it rejects them.
        objective: the loss that is minimised.
        frozen: further models by name, such as a teacher, which the objective may run. They are
            placed like the model, and neither trained nor saved.
        columns: columns that the model takes besides ``input_ids`` and ``labels``.
        prepare_batch: computes, on the host, more inputs of the model from a micro-batch.
        recomputation: whether blocks recompute their activations. :func:`llmtrain.place` sets
            it; ``None`` if it is left to the model.
    """

    model: nn.Module
    files: ModelFormat = None  # type: ignore[assignment] # `llmtrain.place` sets it
    weights: Weights | None = None
    start: dict[str, Any] | None = None
    check: Callable[[], None] = field(default=lambda: None)
    objective: Objective = field(default_factory=Objective)
    frozen: dict[str, ModelBundle] = field(default_factory=dict)
    columns: frozenset[str] = frozenset()
    prepare_batch: Callable[[Batch], Batch] | None = None
    recomputation: Recomputation | None = None
