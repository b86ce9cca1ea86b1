"""Tensor parallelism: the matrices of every block are sharded over a few ranks, which see the same rows.

Each rank multiplies with its shard, and the products are reduced twice a block in each direction (Shoeybi et al. 2019,
arXiv:1909.08053).

A plan says how each module is sharded, in the words of transformers: ``colwise`` along its output, ``rowwise`` along
its input, the embedding and the head along the vocabulary, filters along their channels. Parameters are DTensors with
their names and full shapes, so that whoever saves, loads or measures them need not know; the local shard is what is
computed with.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from llmtrain.errors import UserError
from llmtrain.parallel.blocks import HasEmbeddings
from llmtrain.parallel.collectives import copy_to, gather_from, reduce_from, scatter_to, shard_range
from llmtrain.parallel.shards import to_local
from llmtrain.shipped import shipped_config


class Style(NamedTuple):
    """How a module's parameters are sharded, and what becomes of its input and its output."""

    along: (
        Literal["output", "input", "first"] | None
    )  # the first dimension: of an embedding, the vocabulary
    pieces: int = 1  # one beside the other in the output, each of which is sharded
    scatters: bool = False  # an input that all ranks have
    gathers: bool = False  # the output

    @property
    def reduces(self) -> bool:
        """Tell whether each rank has a summand of the output."""
        return self.along in ("input", "first")


STYLES = {
    "colwise": Style("output"),
    "colwise_of_3": Style("output", pieces=3),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), Style("output", gathers=True)),
    "rowwise": Style("input"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), Style("input", scatters=True)),
    **dict.fromkeys(
        ("embedding_rowwise", "by_itself"), Style("first")
    ),  # the second computes with its shard by itself
    "replicated_with_grad_allreduce": Style(None),
}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters, in place, and have its modules compute with the shards.

    The model's ``tp_plan`` says how. Full tensors may be on the meta device.

    Args:
        model: the model.
        mesh: a mesh of one dimension.

    Raises:
        UserError: if the model has no plan, or if a size does not divide among the ranks.
    """
    kind = type(model).__name__
    plan = _plan_of(model)
    if hasattr(model, "peft_config"):
        raise UserError(
            f"LoRA's matrices have no plan for tensor parallelism; use FSDP ({shipped_config('fsdp2')})."
        )
    if not plan:
        raise UserError(
            f"{kind} has no plan for tensor parallelism; use FSDP ({shipped_config('fsdp2')})."
        )
    _check_heads(model, kind, mesh.size())

    shared: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is sharded once
    for name, module in model.named_modules():
        wish = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))  # * stands for a number
        if wish is None:
            continue
        style = STYLES.get(wish)
        if style is None:
            raise UserError(
                f"{kind} asks for '{wish}' in {name}, which is not supported; use FSDP."
            )
        for key, full in [*module.named_parameters(recurse=False)]:
            dimension = _dimension(module, key, style)
            if dimension is None:
                continue
            if full not in shared:
                _check_divides(kind, name, full.shape[dimension], mesh.size(), style)
                shared[full] = _sharded(full, mesh, dimension, style)
            module.register_parameter(key, shared[full])
        if wish != "by_itself":
            _compute_with_shards(module, style, mesh)


def _check_divides(kind: str, name: str, columns: int, ranks: int, style: Style) -> None:
    """Raise :class:`UserError` if columns must be shared out equally and cannot be."""
    may_be_uneven = style.along == "first" or style.gathers
    if columns % (ranks * style.pieces) and not may_be_uneven:
        raise UserError(
            f"{kind}: the {columns} columns of {name} do not divide among {ranks} processes."
        )


def _sharded(full: nn.Parameter, mesh: DeviceMesh, dimension: int, style: Style) -> nn.Parameter:
    """Return a parameter sharded along one of its dimensions."""
    placement: Shard | _StridedShard = Shard(dimension)
    if style.pieces > 1:
        placement = _StridedShard(dimension, split_factor=style.pieces)
    shard = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(shard, full.requires_grad)


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if plan and isinstance(
        model, HasEmbeddings
    ):  # of transformers, some of which leave the ends out
        head = model.get_output_embeddings()
        own = "by_itself" if hasattr(head, "own_class") else "colwise_gather_output"
        names = {module: name for name, module in model.named_modules()}
        plan[names[model.get_input_embeddings()]] = "embedding_rowwise"
        plan |= {names[head]: own} if head is not None else {}
    return plan


def _check_heads(model: nn.Module, kind: str, size: int) -> None:
    config: object = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("n_head", "num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            raise UserError(
                f"{kind} has {heads} heads ({name}), which do not divide among {size} processes."
            )


def _dimension(module: nn.Module, key: str, style: Style) -> int | None:
    """Return the dimension that a parameter is sharded along: nn.Linear's weight is [out, in], others' [in, out]."""
    if style.along is None or (style.along == "input" and key == "bias"):
        return None
    if style.along == "first" or key == "bias":
        return 0
    return int(isinstance(module, nn.Linear) != (style.along == "output"))


def _compute_with_shards(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    compute = module.forward
    if style.along == "first" and isinstance(module, nn.Embedding):
        compute = _look_up(module, mesh)
    dimension = _dimension(module, "weight", style)
    size = 0 if dimension is None else module.get_parameter("weight").shape[dimension]
    parameters: dict[str, torch.Tensor | None] = vars(module)["_parameters"]
    usable = functools.partial(copy_to, mesh=mesh) if style.along is None else to_local

    def forward(x: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
        device = x.device.type
        if style.along == "output":
            if torch.is_autocast_enabled(device):  # gradients are then summed in as few bits
                x = x.to(torch.get_autocast_dtype(device))
            x = copy_to(x, mesh)
        elif style.scatters:
            x = scatter_to(x, mesh)
        full = dict(parameters)
        shards = {
            key: usable(parameter) for key, parameter in full.items() if parameter is not None
        }
        bias = shards.pop("bias", None) if style.reduces else None
        parameters.update(dict.fromkeys(full) | shards)
        try:
            y: torch.Tensor = compute(x, *others, **named)
        finally:
            parameters.update(full)
        if style.reduces:
            y = reduce_from(y, mesh)
            return y if bias is None else y + bias  # once
        return gather_from(y, mesh, size) if style.gathers else y

    module.forward = forward


def _look_up(embedding: nn.Embedding, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Return the forward of an embedding that has the vectors of some tokens: the others' are zero here."""
    rows, forward = shard_range(embedding.num_embeddings, mesh), embedding.forward
    if embedding.padding_idx is not None:
        embedding.padding_idx = (
            rows.index(embedding.padding_idx) if embedding.padding_idx in rows else None
        )

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        inside = (ids >= rows.start) & (ids < rows.stop)
        return forward((ids - rows.start).where(inside, 0)) * inside[..., None]

    return look_up
