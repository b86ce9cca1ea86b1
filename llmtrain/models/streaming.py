"""The first weights of a Hugging Face model, one piece at a time: for models that no process can hold whole.

A piece is a block of the model, or a module outside the blocks that has weights of its own. A model that is built
without memory (its parameters on the meta device) is the plan; one piece of it is real at a time, on the host.
"""

import contextlib
import copy
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from llmtrain.errors import UserError, first_line
from llmtrain.parallel.mesh import block_classes

Weights = Iterator[tuple[str, torch.Tensor]]
Seen = dict[str, torch.Tensor | None]


def pieces(model: Any) -> list[tuple[str, nn.Module]]:
    """Names and modules, each with all that it holds."""
    blocks = block_classes(model)
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") and type(m).__name__ in blocks for other, m in found)
        if not inside and (type(module).__name__ in blocks or any(True for _ in module.parameters(recurse=False))):
            found.append((name, module))
    return found


def draw(model: Any, seed: int, only: nn.Module | None = None) -> None:
    """Give the modules of a model, or of one piece of it, random weights by the model's own rules, in place.

    What a module is given depends on the seed and on its place in the model alone, and not on what was drawn before.
    """
    from transformers import PreTrainedModel, initialization

    within = {*(only or model).modules()}
    owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    with torch.no_grad(), initialization.guard_torch_init_functions(), torch.random.fork_rng(devices=[]):
        for place, (name, module) in reversed([*enumerate(model.named_modules())]):  # what holds others comes after
            if module not in within:
                continue
            owner = max((o for o in owners if not o or f"{name}.".startswith(f"{o}.")), key=len)
            torch.manual_seed((seed + (place << 32)) % 2**63)
            owners[owner]._init_weights(module)


def drawn(plan: Any, seed: int) -> Weights:
    """What :func:`draw` gives every parameter."""
    done: Seen = {}
    for name, piece in pieces(plan):
        with _real(piece):
            draw(plan, seed, piece)
            yield from _new(name, piece, plan, done)


def stored(plan: Any, folder: Path, dtype: torch.dtype, only: Collection[nn.Module] = ()) -> Weights:
    """Every parameter as the safetensors files of a folder have it, under the names of this model, which published
    names are converted to as transformers does; ``only`` those of some pieces. Raises :class:`UserError` where one is
    missing, or of another shape."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    transforms: Any = get_model_conversion_mapping(plan)
    done: Seen = {}
    homes = {key: name for name, piece in pieces(plan) for key in piece.state_dict(prefix=f"{name}." if name else "")}
    with contextlib.ExitStack() as opened:
        slices: dict[str, dict[str, Any]] = defaultdict(dict)
        ties = plan.get_expanded_tied_weights_keys(all_submodels=True)
        twice = set()  # what is tied, and stored under another name, too
        for file, key, name in _keys(plan, folder, opened):
            slices[homes.get(name, "")][key] = file.get_slice(key)
            twice |= {ties[name]} if name in ties else set()
        for name, piece in pieces(plan):
            if only and piece not in only:
                continue
            settings = LoadStateDictConfig(
                dtype=dtype, device_map={"": "cpu"}, weight_mapping=copy.deepcopy(transforms)
            )
            with _restored(piece):
                found, _ = convert_and_load_state_dict_in_model(plan, slices[name], settings)
                for key, *shapes in found.mismatched_keys:
                    raise UserError(f"{folder}: {key} is of another shape: {shapes[0]}.")
                for error in [*found.conversion_errors.values(), *found.error_msgs]:
                    raise UserError(f"{folder}: {first_line(Exception(error))}")
                yield from _new(name, piece, plan, done, twice)
    needed = {name for name, parameter in plan.named_parameters() if not only or parameter.is_meta}
    if not only and (absent := sorted(needed - done.keys())):
        raise UserError(f"{folder}: {absent[0]} is missing ({len(absent)} are).")


def load_buffers(model: Any, folder: Path) -> None:
    """Fill the buffers that a model is published with, which are small and on every process whole."""
    buffers = {
        name: buffer
        for name, buffer in model.state_dict(keep_vars=True).items()
        if not isinstance(buffer, nn.Parameter)
    }
    with contextlib.ExitStack() as opened:
        for file, key, name in _keys(model, folder, opened):
            if name in buffers:
                buffers.pop(name).copy_(file.get_tensor(key))
    if buffers:
        raise UserError(f"{folder}: {min(buffers)} is missing ({len(buffers)} are).")


def _keys(model: Any, folder: Path, opened: contextlib.ExitStack) -> Iterator[tuple[Any, str, str]]:
    """Open the files of a folder: file, published name, and the name of this model that it becomes or goes into."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    known = model.state_dict()
    for path in _files(folder):
        try:
            file = opened.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: {first_line(error)}") from None
        for key in file.keys():  # noqa: SIM118 - it is no dict
            name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            yield file, key, name if name in known else key


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights, as transformers looks for them: others may stand beside them."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists() or not index.exists():
        return [one] if one.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: {first_line(error)}.") from None
    return [folder / name for name in names]


def _new(prefix: str, piece: nn.Module, plan: Any, done: Seen, twice: Collection[str] = ()) -> Weights:
    """The parameters of a piece that are real, and have not come before under another name of theirs. Raises
    :class:`UserError` where one comes ``twice`` and differs: ``from_pretrained`` would untie it."""
    ties = plan.get_expanded_tied_weights_keys(all_submodels=True)
    for name, parameter in piece.named_parameters(prefix):
        kept = ties.get(name, name)
        if parameter.is_meta:
            continue
        if kept not in done:
            done[kept] = parameter.detach() if kept in twice else None
            yield kept, parameter.detach()
        elif (before := done[kept]) is not None and not torch.equal(before, parameter):
            raise UserError(f"{name} differs from {kept}, to which it is tied; set tie_word_embeddings to false.")


@contextlib.contextmanager
def _real(piece: nn.Module) -> Iterator[None]:
    """A piece with memory for its weights, which are not yet anything."""
    with _restored(piece):
        for module in piece.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad))
        yield


@contextlib.contextmanager
def _restored(piece: nn.Module) -> Iterator[None]:
    """Put the parameters that a piece has now back in the end."""
    before = {module: dict(module.named_parameters(recurse=False)) for module in piece.modules()}
    try:
        yield
    finally:
        for module, parameters in before.items():
            for name, parameter in parameters.items():
                setattr(module, name, parameter)


def renamed(weights: Iterable[tuple[str, torch.Tensor]], names: dict[str, str]) -> Weights:
    for name, whole in weights:
        if name in names:
            yield names[name], whole
