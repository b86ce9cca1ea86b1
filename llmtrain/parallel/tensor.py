"""Tensor parallelism: the matrices of every block are cut over a few processes, which see the same rows. Each
multiplies with its part, and what they make is added up, twice a block in each direction (Shoeybi et al. 2019,
arXiv:1909.08053).

A plan says of each module how it is cut, in the words of transformers: ``colwise`` by what it puts out, ``rowwise`` by
what it takes in, the embedding and the head by the vocabulary. Parameters are DTensors of their names and whole shapes,
so that whoever saves, loads or measures them need not know; what is computed with is this process's part.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from llmtrain.errors import UserError
from llmtrain.parallel.collectives import copy_to, gather_from, reduce_from, scatter_to, shard_range
from llmtrain.parallel.mesh import to_local
from llmtrain.shipped import shipped_config


class Style(NamedTuple):
    """What is cut of a module's weight, and what becomes of its input and its output."""

    cut: Literal["out", "in", "vocabulary"] | None  # the vocabulary is the first dimension of an embedding
    takes: Literal["as it is", "a copy", "its part"] = "as it is"  # of an input that all have, where it is not as it is
    gives: Literal["its part", "the sum", "all parts"] = "its part"
    pieces: int = 1  # one beside the other in the output, each of which is cut


STYLES = {
    "colwise": Style("out", takes="a copy"),
    "colwise_of_3": Style("out", takes="a copy", pieces=3),
    "colwise_gather_output": Style("out", takes="a copy", gives="all parts"),
    "colwise_rep": Style("out", takes="a copy", gives="all parts"),
    "rowwise": Style("in", gives="the sum"),
    "rowwise_split_input": Style("in", takes="its part", gives="the sum"),
    "rowwise_rep": Style("in", takes="its part", gives="the sum"),
    "embedding_rowwise": Style("vocabulary", gives="the sum"),
    "head": Style("vocabulary"),  # which computes with its part by itself
    "replicated_with_grad_allreduce": Style(None),
}


def cut_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Cut the parameters of a model, in place, over the processes of a mesh of one dimension, as its ``tp_plan`` says;
    and have its modules compute with these parts. Whole parameters may be on the meta device.

    Raises :class:`UserError` where the model has no plan, or one that does not divide.
    """
    kind, size = getattr(model, "own_class", type(model)).__name__, mesh.size()
    plan = _plan_of(model)
    if not plan:
        raise UserError(f"{kind} has no plan for tensor parallelism; use FSDP ({shipped_config('fsdp2')}).")
    if hasattr(model, "peft_config"):
        raise UserError(f"LoRA's matrices have no plan for tensor parallelism; use FSDP ({shipped_config('fsdp2')}).")
    _check_heads(model, kind, size)
    shared: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is cut once
    for name, module, said in _modules(model, plan):
        style = STYLES.get(said)
        if style is None:
            raise UserError(f"{kind} is to be cut '{said}' in {name}, which is not supported; use FSDP.")
        for key, whole in [*module.named_parameters(recurse=False)]:
            dimension = _dimension(module, key, style)
            if dimension is None:
                continue
            if whole not in shared:
                columns = whole.shape[dimension]
                if columns % (size * style.pieces) and style.cut != "vocabulary" and style.gives != "all parts":
                    raise UserError(f"{kind}: the {columns} columns of {name} do not divide among {size} processes.")
                strided = _StridedShard(dimension, split_factor=style.pieces)
                placement = strided if style.pieces > 1 else Shard(dimension)
                cut = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
                shared[whole] = nn.Parameter(cut, whole.requires_grad)
            module.register_parameter(key, shared[whole])
        if said != "head":
            _compute_with_parts(module, style, mesh)


def _plan_of(model: Any) -> dict[str, str]:
    plan = dict(getattr(model, "tp_plan", None) or {})
    if plan and hasattr(model, "get_output_embeddings"):  # of transformers, some of which leave the ends out
        head = model.get_output_embeddings()
        own = "head" if hasattr(head, "own_class") else "colwise_gather_output"
        ends = {"embedding_rowwise": model.get_input_embeddings(), own: head}
        names = {module: name for name, module in model.named_modules()}
        plan |= {names[module]: style for style, module in ends.items() if module is not None}
    return plan


def _modules(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Those of a plan, in whose names * stands for a number."""
    for name, module in model.named_modules():
        said = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if said is not None:
            yield name, module, said


def _check_heads(model: Any, kind: str, size: int) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for name in ("n_head", "num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            raise UserError(f"{kind} has {heads} heads ({name}), which do not divide among {size} processes.")


def _dimension(module: nn.Module, key: str, style: Style) -> int | None:
    """Which of a parameter is cut, if one is: a linear module's weight is [out, in], that of others [in, out]."""
    if style.cut is None or (style.cut == "in" and key == "bias"):
        return None
    if style.cut == "vocabulary" or key == "bias":
        return 0
    return int(isinstance(module, nn.Linear) != (style.cut == "out"))


def _compute_with_parts(module: Any, style: Style, mesh: DeviceMesh) -> None:
    inner = _among_others(module, mesh) if style.cut == "vocabulary" else module.forward
    dimension = _dimension(module, "weight", style)
    width = 0 if dimension is None else module.weight.shape[dimension]

    def forward(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if style.takes == "a copy":
            x = copy_to(_in_autocast(x), mesh)  # whose gradients are then added up in as few bits
        elif style.takes == "its part":
            x = scatter_to(x, mesh)
        whole = dict(module._parameters)
        parts: dict[str, Any] = {key: _usable(p, style, mesh) for key, p in whole.items()}
        bias = parts.pop("bias", None) if style.gives == "the sum" else None
        module._parameters.update(dict.fromkeys(whole) | parts)
        try:
            y = inner(x, *others, **named)
        finally:
            module._parameters.update(whole)
        if style.gives == "the sum":
            y = reduce_from(y, mesh)
            return y if bias is None else y + bias  # once
        return gather_from(y, mesh, width) if style.gives == "all parts" else y

    module.forward = forward


def _in_autocast(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _usable(parameter: nn.Parameter | None, style: Style, mesh: DeviceMesh) -> torch.Tensor | None:
    if parameter is None:
        return None
    return copy_to(parameter, mesh) if style.cut is None else to_local(parameter)


def _among_others(embedding: nn.Embedding, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """What an embedding does that has the vectors of some tokens: those of others are zero here."""
    rows, whole = shard_range(embedding.num_embeddings, mesh), embedding.forward
    if embedding.padding_idx is not None:
        embedding.padding_idx = rows.index(embedding.padding_idx) if embedding.padding_idx in rows else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        inside = (ids >= rows.start) & (ids < rows.stop)
        return whole((ids - rows.start).where(inside, 0)) * inside[..., None]

    return forward
