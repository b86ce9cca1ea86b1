"""The first weights of a Hugging Face model, one piece at a time: for models that no process can hold whole.

A piece is a block of the model, or a module outside the blocks that has weights of its own. A model on the meta device
is the plan; one piece of it is real at a time, on the host.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from llmtrain.contract import Weights
from llmtrain.errors import UserError, first_line
from llmtrain.parallel.mesh import block_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming

_Given = dict[
    str, Tensor | None
]  # parameters that were given already; those that come twice, with their tensor


def pieces(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules, each with all that it holds."""
    blocks = block_classes(model)
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(
            name.startswith(f"{other}.") and type(m).__name__ in blocks for other, m in found
        )
        if not inside and (
            type(module).__name__ in blocks or any(True for _ in module.parameters(recurse=False))
        ):
            found.append((name, module))
    return found


def drawn(plan: "PreTrainedModel", seed: int, only: Collection[nn.Module] = ()) -> Weights:
    """Yield random weights by the model's own rules for every parameter, or for those of ``only`` some pieces.

    The weights of a module depend on the seed and on its place in the model alone, not on what was drawn before.
    """
    from transformers import PreTrainedModel, initialization

    ties, given = plan.get_expanded_tied_weights_keys(all_submodels=True), _Given()
    owners = {
        name: module for name, module in plan.named_modules() if isinstance(module, PreTrainedModel)
    }
    places = {name: place for place, (name, _) in enumerate(plan.named_modules())}
    for prefix, piece in pieces(plan):
        if only and piece not in only:
            continue
        real = copy.deepcopy(piece).to_empty(device="cpu")
        with (
            torch.no_grad(),
            initialization.guard_torch_init_functions(),
            torch.random.fork_rng(devices=[]),
        ):
            for name, module in reversed(
                [*real.named_modules(prefix=prefix)]
            ):  # what holds others comes after
                owner = max((o for o in owners if not o or f"{name}.".startswith(f"{o}.")), key=len)
                torch.manual_seed((seed + (places[name] << 32)) % 2**63)
                owners[owner]._init_weights(module)  # type: ignore[no-untyped-call]
        yield from _new(prefix, real, ties, given)


def stored(
    plan: "PreTrainedModel",
    folder: Path,
    dtype: torch.dtype,
    only: Collection[nn.Module] = (),
    seed: int | None = None,
) -> Weights:
    """Yield every parameter as a folder's safetensors files have it, or those of ``only`` some pieces.

    Published names are converted to those of the model as transformers does. With a ``seed``, a head that gives scores
    is drawn where it is missing. Raises :class:`UserError` where a parameter is missing, or of another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    transforms = get_model_conversion_mapping(plan)
    ties, given = plan.get_expanded_tied_weights_keys(all_submodels=True), _Given()
    homes = {
        key: name
        for name, piece in pieces(plan)
        for key in piece.state_dict(prefix=f"{name}." if name else "")
    }
    places: dict[str, dict[Path, list[str]]] = defaultdict(lambda: defaultdict(list))
    twice = set()  # tied, and stored under another name, too
    for path, key, name in _keys(plan, folder):
        places[homes.get(name, "")][path].append(key)
        twice |= {ties[name]} if name in ties else set()
    for prefix, piece in pieces(plan):
        if only and piece not in only:
            continue
        slices: dict[str, object] = {}
        for path, keys in places[
            prefix
        ].items():  # opened for each piece anew, or pages that were read would stay
            file = safe_open(path, "pt")
            slices |= {key: file.get_slice(key) for key in keys}  # type: ignore[no-untyped-call]
        mapping: list[WeightRenaming | WeightConverter] = copy.deepcopy(transforms)  # type: ignore[arg-type]
        settings = LoadStateDictConfig(dtype=dtype, device_map={"": "cpu"}, weight_mapping=mapping)
        before = [
            (m, name, p) for m in piece.modules() for name, p in m.named_parameters(recurse=False)
        ]
        found, _ = convert_and_load_state_dict_in_model(plan, slices, settings)
        for key, *shapes in found.mismatched_keys:
            raise UserError(f"{folder}: {key} is of another shape: {shapes[0]}.")
        for error in [*found.conversion_errors.values(), *found.error_msgs]:
            raise UserError(f"{folder}: {first_line(Exception(error))}")
        yield from _new(prefix, piece, ties, given, twice)
        for module, name, parameter in before:  # without memory again
            setattr(module, name, parameter)
    if seed is not None and not only and "score.weight" not in given:
        for name, whole in drawn(plan, seed, [plan.get_submodule("score")]):
            given[name] = None
            yield name, whole
    if not only and (
        absent := sorted({name for name, _ in plan.named_parameters()} - given.keys())
    ):
        raise UserError(f"{folder}: {absent[0]} is missing ({len(absent)} are).")


def load_buffers(model: "PreTrainedModel", folder: Path) -> None:
    """Fill the buffers that a model is published with, which are small and full on every rank."""
    tensors = model.state_dict(keep_vars=True)
    buffers = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if not isinstance(tensor, nn.Parameter)
    }
    for path, key, name in _keys(model, folder):
        if name in buffers:
            buffers.pop(name).copy_(safe_open(path, "pt").get_tensor(key))  # type: ignore[no-untyped-call]
    if buffers:
        raise UserError(f"{folder}: {min(buffers)} is missing ({len(buffers)} are).")


def _keys(model: "PreTrainedModel", folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the files of a folder with each name in them, and the name of this model that it becomes or goes into."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    known = model.state_dict()
    for path in _files(folder):
        try:
            keys = [*safe_open(path, "pt").keys()]  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {first_line(error)}") from None
        for key in keys:
            name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            yield path, key, name if name in known else key


def _files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, as transformers looks for them: others may stand beside them."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists() or not index.exists():
        return [one] if one.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(
            {Path(name).name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: {first_line(error)}.") from None
    return [folder / name for name in names]


def _new(
    prefix: str, piece: nn.Module, ties: dict[str, str], given: _Given, twice: Collection[str] = ()
) -> Weights:
    """Yield the parameters of a piece that are real, and were not given already under another name of theirs.

    Raises :class:`UserError` where one comes ``twice`` and differs: ``from_pretrained`` would untie it.
    """
    for name, parameter in piece.named_parameters(prefix):
        kept = ties.get(name, name)
        if parameter.is_meta:
            continue
        if kept not in given:
            given[kept] = parameter.detach() if kept in twice else None
            yield kept, parameter.detach()
        elif (before := given[kept]) is not None and not torch.equal(before, parameter):
            raise UserError(
                f"{name} differs from {kept}, to which it is tied; set tie_word_embeddings to false."
            )
