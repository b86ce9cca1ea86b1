"""Tensor parallelism: ranks shard the matrices of every block, and compute on the same rows.

Each rank multiplies with its shards. In each direction, forward and backward, the products of a
block are reduced twice (Shoeybi et al. 2019, arXiv:1909.08053).

A plan says how each module is sharded, with the names that transformers uses: ``colwise`` along
its output, ``rowwise`` along its input, the embedding and the head along the vocabulary, and
filters along their channels. Parameters become DTensors with the same names and full shapes, so
code that saves, loads or measures them stays the same. The module computes with the local shards.
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
    """How a module's parameters are sharded, and how its input and output are exchanged.

    Attributes:
        along: the dimension along which parameters are sharded: that of the module's output or
            input, or the first dimension, which for an embedding is the vocabulary. ``None`` if the
            parameters are replicated.
        pieces: matrices that lie side by side in the output, such as query, key and value. Each of
            them is sharded.
        scatters: whether the input is the same on all ranks, and each keeps its part.
        gathers: whether the output is gathered.
    """

    along: Literal["output", "input", "first"] | None
    pieces: int = 1
    scatters: bool = False
    gathers: bool = False

    @property
    def reduces(self) -> bool:
        """Whether the module's outputs on all ranks are summed."""
        return self.along in ("input", "first")


STYLES = {
    "colwise": Style("output"),
    "colwise_of_3": Style("output", pieces=3),
    "colwise_gather_output": Style("output", gathers=True),
    "colwise_rep": Style("output", gathers=True),
    "rowwise": Style("input"),
    "rowwise_split_input": Style("input", scatters=True),
    "rowwise_rep": Style("input", scatters=True),
    "embedding_rowwise": Style("first"),
    "by_itself": Style("first"),  # the module's own code computes with its shard
    "replicated_with_grad_allreduce": Style(None),
}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters, in place, and let its modules compute with the shards.

    The model's ``tp_plan`` says how. Full tensors may be on the meta device.

    Args:
        model: the model.
        mesh: a one-dimensional mesh.

    Raises:
        UserError: if the model has no plan, or if a size cannot be divided among the ranks.
    """
    class_name = type(model).__name__
    plan = _plan_of(model)
    if hasattr(model, "peft_config"):
        raise UserError(
            "LoRA's matrices have no plan for tensor parallelism; "
            f"use FSDP ({shipped_config('fsdp2')})."
        )
    if not plan:
        raise UserError(
            f"{class_name} has no plan for tensor parallelism; "
            f"use FSDP ({shipped_config('fsdp2')})."
        )
    _check_heads(model, class_name, mesh.size())

    sharded: dict[nn.Parameter, nn.Parameter] = {}  # by full parameter: tied weights stay tied
    for name, module in model.named_modules():
        # In the names of a plan, * stands for a number.
        style_name = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style_name is None:
            continue
        style = STYLES.get(style_name)
        if style is None:
            raise UserError(
                f"{class_name}: the style '{style_name}' that its plan has for {name} is not "
                f"supported; use FSDP ({shipped_config('fsdp2')})."
            )

        for key, full in [*module.named_parameters(recurse=False)]:
            dimension = _dimension(module, key, style)
            if dimension is None:
                continue
            if full not in sharded:
                _check_divides(
                    full.shape[dimension],
                    ranks=mesh.size(),
                    style=style,
                    name=f"{class_name}: {name}",
                )
                sharded[full] = _shard(full, mesh, dimension, style)
            module.register_parameter(key, sharded[full])

        if style_name != "by_itself":
            _compute_with_shards(module, style, mesh)


def _check_divides(columns: int, *, ranks: int, style: Style, name: str) -> None:
    """Raise :class:`UserError` if all ranks need the same number of columns and cannot get it."""
    may_be_uneven = style.along == "first" or style.gathers
    if columns % (ranks * style.pieces) and not may_be_uneven:
        raise UserError(
            f"{name} has {columns} columns, which cannot be divided among {ranks} processes; "
            "use another number of processes for tensor parallelism."
        )


def _shard(full: nn.Parameter, mesh: DeviceMesh, dimension: int, style: Style) -> nn.Parameter:
    """Return a parameter sharded along one of its dimensions."""
    placement: Shard | _StridedShard = Shard(dimension)
    if style.pieces > 1:
        placement = _StridedShard(dimension, split_factor=style.pieces)
    shard = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(shard, full.requires_grad)


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the name of a style for each sharded module; empty if the model has no plan."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan or not isinstance(model, HasEmbeddings):
        return plan

    # The plans of some models in transformers leave out the embedding and the head.
    names = {module: name for name, module in model.named_modules()}
    plan[names[model.get_input_embeddings()]] = "embedding_rowwise"
    head = model.get_output_embeddings()
    if head is not None:
        is_loss_head = hasattr(head, "own_class")
        plan[names[head]] = "by_itself" if is_loss_head else "colwise_gather_output"
    return plan


def _check_heads(model: nn.Module, class_name: str, ranks: int) -> None:
    """Raise :class:`UserError` if the attention heads cannot be divided among the ranks."""
    config: object = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for name in ("n_head", "num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % ranks:
            raise UserError(
                f"{class_name} has {heads} heads ({name}), which cannot be divided among {ranks} "
                "processes; use another number of processes for tensor parallelism."
            )


def _dimension(module: nn.Module, key: str, style: Style) -> int | None:
    """Return the dimension along which a parameter is sharded; ``None`` if it is replicated."""
    if style.along is None or (style.along == "input" and key == "bias"):
        return None
    if style.along == "first" or key == "bias":
        return 0

    # nn.Linear's weight is [out, in]; that of other modules is [in, out].
    output_dimension = 0 if isinstance(module, nn.Linear) else 1
    return output_dimension if style.along == "output" else 1 - output_dimension


def _compute_with_shards(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    """Replace a module's ``forward`` by one that computes with this rank's shards."""
    compute = module.forward
    if style.along == "first" and isinstance(module, nn.Embedding):
        compute = _look_up(module, mesh)
    dimension = _dimension(module, "weight", style)
    size = 0 if dimension is None else module.get_parameter("weight").shape[dimension]
    parameters: dict[str, torch.Tensor | None] = vars(module)["_parameters"]

    # Replicated parameters have a different gradient on each rank, so it is summed.
    to_usable = functools.partial(copy_to, mesh=mesh) if style.along is None else to_local

    def prepare_input(x: torch.Tensor) -> torch.Tensor:
        if style.along == "output":
            # Cast first, so that the gradient is summed over the ranks in as few bits.
            device = x.device.type
            if torch.is_autocast_enabled(device):
                x = x.to(torch.get_autocast_dtype(device))
            return copy_to(x, mesh)
        return scatter_to(x, mesh) if style.scatters else x

    def forward(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        x = prepare_input(x)

        # Compute with shards in the place of the parameters. If the output is summed over the
        # ranks, the bias is left out here and added once, after the sum.
        full = dict(parameters)
        shards = {key: to_usable(p) for key, p in full.items() if p is not None}
        bias = shards.pop("bias", None) if style.reduces else None
        parameters.update(dict.fromkeys(full) | shards)
        try:
            y: torch.Tensor = compute(x, *args, **kwargs)
        finally:
            parameters.update(full)

        if style.reduces:
            y = reduce_from(y, mesh)
            return y if bias is None else y + bias
        return gather_from(y, mesh, size) if style.gathers else y

    module.forward = forward


def _look_up(embedding: nn.Embedding, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Return a ``forward`` for an embedding of which this rank holds some rows.

    The vectors of tokens on other ranks are zero, so that the sum over the ranks has all vectors.
    """
    rows = shard_range(embedding.num_embeddings, mesh)
    forward = embedding.forward

    padding_idx = embedding.padding_idx
    if padding_idx is not None:
        embedding.padding_idx = rows.index(padding_idx) if padding_idx in rows else None

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        is_inside = (ids >= rows.start) & (ids < rows.stop)
        local_ids = (ids - rows.start).where(is_inside, 0)
        return forward(local_ids) * is_inside[..., None]

    return look_up
