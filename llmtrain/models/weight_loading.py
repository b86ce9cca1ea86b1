"""Load the weights of a Hugging Face model one part at a time, from safetensors files or a seed.

A part is a block, or a module outside the blocks such as the embedding. The model stays on the
meta device, and each rank copies its shards out of full tensors. So a rank holds its shards and one
part.

``from_pretrained`` needs no more memory. Two CPU ranks with FSDP2 loaded a Llama with 271 million
parameters as float32, of which each holds 517 MiB. The peak was 519 MiB with ``from_pretrained``
and ``distributed_config``, 649 MiB with this module, and 1,059 MiB if every rank loads the full
model before it is sharded (mapped files are not counted).

But ``from_pretrained`` (transformers 5.23) cannot do the following:

- **Shard every checkpoint correctly.** It takes a rank's shard of each stored tensor first, and
  splits or joins tensors afterwards. If it splits or joins them along the sharded dimension, the
  weights are silently wrong. On two ranks this happened to 24 of the 35 parameters of a small
  HRM-Text, and to 2 of the 42 of a small Kimi Linear.
- **Fill a model that is already sharded.** It shards by its own plans. Ours keep norms in float32,
  for example, and LoRA has renamed parameters by then.
- **Copy float32 weights.** They stay mapped from the file. If the file is overwritten during a run,
  the weights change. If it is truncated, the process dies of a bus error.
- **Refuse a checkpoint that does not fit.** If weights are missing, it initialises them. If tied
  weights differ, it unties them. It only logs both.
- **Initialise the same weights on any number of ranks.** ``from_config`` initialises the full model
  on every rank. If the shards are initialised in place instead, the weights depend on the number of
  ranks.

Without sharding, ``from_pretrained`` loads the same weights. It is not used for that, because it
would be a second path with separate checks. Quantized models are loaded with it, since they are
never sharded (:mod:`llmtrain.models.meta_models`).
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.interfaces.model_bundle import Weights
from llmtrain.model_folders import weight_files
from llmtrain.parallel.blocks import block_classes
from llmtrain.seeds import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming


# The ends of the names of buffers that old checkpoints store, and that are computed today: causal
# masks and frequencies of rotary positions.
COMPUTED_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)


class Part(NamedTuple):
    """A block of a model, or a module outside the blocks that has parameters itself."""

    name: str
    module: nn.Module


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint.

    Attributes:
        path: the file.
        key: the name of the tensor in the file.
        name: the parameter or buffer that it becomes, alone or joined with other tensors.
    """

    path: Path
    key: str
    name: str

    def read(self) -> Tensor:
        """Return the tensor, which may be mapped from its file."""
        tensor: Tensor = safe_open(self.path, "pt").get_tensor(self.key)  # type: ignore[no-untyped-call]
        return tensor


def random_weights(
    model: "PreTrainedModel", seed: int, modules: Collection[nn.Module] = ()
) -> Weights:
    """Yield random initial weights, as the model's class initialises them.

    The weights of a module depend only on ``seed`` and on the name of the module in the model.
    Every rank can therefore initialise one part at a time and arrive at the same weights.
    A parameter that ``_init_weights`` leaves alone keeps the values that ``__init__`` gives it.

    Args:
        model: the model, on the meta device. It is on the meta device again after each part.
        seed: the seed of the run.
        modules: yield only the weights of these parts of the model. If empty, yield all weights.

    Yields:
        Names of parameters with full tensors on the CPU, in float32 or wider.

    Raises:
        UserError: if the class does not initialise a parameter.
    """
    stream = _ParameterStream(model)
    values_by_owner: dict[type[nn.Module], dict[str, Tensor]] = {}
    for part in _selected_parts(model, modules):
        # In its place in the model, because a class may ask for the name of a module.
        with _parameters_restored(part.module):
            _initialise(model, part, seed)
            for name, initialised in stream.new_parameters(part.name, part.module):
                tensor = initialised
                if tensor.isnan().any():
                    owner = type(model.get_submodule(name.rpartition(".")[0]))
                    if owner not in values_by_owner:
                        values_by_owner[owner] = _values_set_by_init(model, owner, seed)
                    tensor = values_by_owner[owner][name]
                if tensor.isnan().any():
                    raise UserError(
                        f"{type(model).__name__} gives {name} no initial values; start from a "
                        "trained model with --model_name_or_path."
                    )
                yield name, tensor


def _initialise(model: "PreTrainedModel", part: Part, seed: int) -> None:
    """Make the parameters of a part real, and initialise them as the model's class does.

    Parameters that the class leaves alone are NaN afterwards.
    """
    from transformers import PreTrainedModel, initialization

    _fill_with_nan(part.module)
    # Children come first, because a module may initialise parameters of its children.
    inner = [*part.module.named_modules(prefix=part.name)]
    outer = []
    name = part.name
    while name:
        name = name.rpartition(".")[0]
        outer.append((name, model.get_submodule(name)))
    submodels = {
        name: module for name, module in [*inner, *outer] if isinstance(module, PreTrainedModel)
    }
    with (
        torch.no_grad(),
        initialization.guard_torch_init_functions(),
        torch.random.fork_rng(devices=[]),
    ):
        for name, module in [*reversed(inner), *outer]:
            # `torch.manual_seed` would also seed devices of every kind, which takes 0.3 ms.
            torch.default_generator.manual_seed(seed_of(seed, name, part.name))
            containing = [key for key in submodels if not key or f"{name}.".startswith(f"{key}.")]
            submodel = submodels[max(containing, key=len)]  # the innermost
            submodel._init_weights(module)  # type: ignore[no-untyped-call]


def _fill_with_nan(module: nn.Module) -> None:
    """Replace the parameters of a module by real ones that are NaN. Tied ones stay tied.

    They are float32 at least: the numbers that torch draws depend on the dtype.
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in real:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                values = torch.full(parameter.shape, torch.nan, dtype=dtype, device="cpu")
                real[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(owner, name, real[parameter])


def _values_set_by_init(
    model: "PreTrainedModel", owner: type[nn.Module], seed: int
) -> dict[str, Tensor]:
    """Return the parameters of modules of one class, with the values that ``__init__`` sets.

    The other parameters are on the meta device meanwhile, so this takes little memory. A value that
    nothing sets is NaN.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def without_others(module: nn.Module, _: str, parameter: nn.Parameter) -> nn.Parameter:
        if type(module) is owner:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    # torch's annotation says that the hook returns nothing; its documentation says a parameter.
    hook = register_module_parameter_registration_hook(without_others)  # type: ignore[arg-type]
    torch.use_deterministic_algorithms(True)  # `torch.empty` then fills its result with NaN
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(seed, owner.__name__))
            built = type(model)(copy.deepcopy(model.config))
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        hook.remove()
    return {
        name: parameter.detach()
        for name, parameter in built.named_parameters()
        if not parameter.is_meta
    }


def stored_weights(
    model: "PreTrainedModel",
    folder: Path,
    dtype: torch.dtype,
    modules: Collection[nn.Module] = (),
    head_seed: int | None = None,
) -> Weights:
    """Yield the weights that are stored in the safetensors files of a folder.

    transformers converts names and layouts of published checkpoints to those of its model class.

    Args:
        model: the model, on the meta device. It is on the meta device again after each part.
        folder: a folder with ``model.safetensors``, or with several files and their index.
        dtype: of the result.
        modules: yield only the weights of these parts of the model. If empty, yield all weights.
        head_seed: the seed of a missing ``score`` head. If it is ``None``, the head must be stored.

    Yields:
        Names of parameters with full tensors on the CPU. Copy each tensor before you take the next
        one, because it may be mapped from its file.

    Raises:
        UserError: if a file cannot be read, if a parameter is missing or has another shape, or if
            two tied parameters are stored with different values.
    """
    tied_names = _tied_names(model)
    tensors = [*stored_tensors(model, folder)]
    stored_twice = {tied_names[tensor.name] for tensor in tensors if tensor.name in tied_names}
    tensors_of_part = _group_by_part(model, tensors)

    stream = _ParameterStream(model, stored_twice)
    for part in _selected_parts(model, modules):
        with _parameters_restored(part.module):
            _load_part(model, folder, tensors_of_part[part.name], dtype)
            yield from stream.new_parameters(part.name, part.module)
    if modules:
        return

    missing = {name for name, _ in model.named_parameters()} - stream.names
    if head_seed is not None and "score.weight" in missing:
        head = model.get_submodule("score")
        yield from random_weights(model, head_seed, [head])
        missing -= {name for name, _ in head.named_parameters("score")}
    _check_none_missing(folder, missing)


def load_buffers(model: "PreTrainedModel", folder: Path) -> None:
    """Load the buffers that are stored with a model, such as the routing biases of DeepSeek-V3.

    Buffers are small, and every rank holds them in full.

    Raises:
        UserError: if a file cannot be read, or if a buffer is missing.
    """
    buffers = {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter)
    }
    for stored in stored_tensors(model, folder):
        if stored.name in buffers:
            buffers.pop(stored.name).copy_(stored.read())
    _check_none_missing(folder, buffers.keys())


def model_parts(model: nn.Module) -> list[Part]:
    """Return the parts of a model whose weights are loaded together.

    Only one part is in memory at a time, so a part should be no larger than a block.
    """
    classes = block_classes(model)
    parts: list[Part] = []
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in blocks):
            continue
        is_block = type(module).__name__ in classes
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if is_block:
            blocks.append(name)
        if is_block or has_parameters:
            parts.append(Part(name, module))
    return parts


class _ParameterStream:
    """Yields each parameter once, although a tied parameter belongs to several modules.

    Attributes:
        names: the names that were yielded.
    """

    def __init__(self, model: "PreTrainedModel", stored_twice: Collection[str] = ()) -> None:
        """Begin a stream.

        Args:
            model: the model, which knows the names that tied parameters share.
            stored_twice: tied parameters that a checkpoint stores under a second name, too. Both
                values must agree, because ``from_pretrained`` unties parameters that differ.
        """
        self.names: set[str] = set()
        self._tied_names = _tied_names(model)
        self._stored_twice = stored_twice
        self._first_values: dict[str, Tensor] = {}

    def new_parameters(self, prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield those parameters of a module that have values and were not yielded before.

        Raises:
            UserError: if a parameter was yielded before, under its other name, and differs.
        """
        for own_name, parameter in module.named_parameters(prefix):
            if parameter.is_meta:
                continue
            tensor = parameter.detach()
            name = self._tied_names.get(own_name, own_name)
            if name not in self.names:
                self.names.add(name)
                if name in self._stored_twice:
                    self._first_values[name] = tensor
                yield name, tensor
            elif name in self._first_values and not torch.equal(self._first_values[name], tensor):
                raise UserError(
                    f"{own_name} differs from {name}, to which it is tied; "
                    "set tie_word_embeddings to false in config.json."
                )


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, with the name under which each is listed."""
    listed = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name: listed[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != listed[parameter]
    }


def _selected_parts(model: nn.Module, modules: Collection[nn.Module]) -> Iterator[Part]:
    """Yield all parts of a model, or those that are in ``modules`` if it is not empty."""
    for part in model_parts(model):
        if not modules or part.module in modules:
            yield part


def _group_by_part(
    model: nn.Module, tensors: Collection[StoredTensor]
) -> dict[str, list[StoredTensor]]:
    """Return the stored tensors of each part. Tensors that the model does not have are left out."""
    part_of_name: dict[str, str] = {}
    for part in model_parts(model):
        prefix = f"{part.name}." if part.name else ""
        for name in part.module.state_dict(prefix=prefix):
            part_of_name[name] = part.name

    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.name in part_of_name:
            groups[part_of_name[tensor.name]].append(tensor)
    return groups


@contextmanager
def _parameters_restored(module: nn.Module) -> Iterator[None]:
    """Restore the present parameters of a module, which are on the meta device, on exit."""
    parameters = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            parameters.append((owner, name, parameter))
    try:
        yield
    finally:
        for owner, name, parameter in parameters:
            setattr(owner, name, parameter)


def _load_part(
    model: "PreTrainedModel", folder: Path, tensors: Collection[StoredTensor], dtype: torch.dtype
) -> None:
    """Replace parameters of a model by stored tensors, converted by transformers.

    Raises:
        UserError: if a tensor has another shape than its parameter, or cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    # Open the files again for each part: pages that were read stay in memory until the file closes.
    paths = {tensor.path for tensor in tensors}
    files = {path: safe_open(path, "pt") for path in paths}
    slices: dict[str, object] = {}
    for tensor in tensors:
        file = files[tensor.path]
        slices[tensor.key] = file.get_slice(tensor.key)  # type: ignore[no-untyped-call]

    # Conversions remember which tensors they were used for, so each part needs new ones.
    conversions = cast(
        "list[WeightRenaming | WeightConverter]", get_model_conversion_mapping(model)
    )
    settings = LoadStateDictConfig(dtype=dtype, device_map={"": "cpu"}, weight_mapping=conversions)
    result, _ = convert_and_load_state_dict_in_model(model, slices, settings)

    for key, stored_shape, shape in result.mismatched_keys:
        raise UserError(
            f"{folder}: {key} has the shape {[*stored_shape]}, but the model needs {[*shape]}."
        )
    for error in [*result.conversion_errors.values(), *result.error_msgs]:
        raise UserError(f"{folder}: {first_line(Exception(error))}")


def _check_none_missing(folder: Path, missing: Collection[str]) -> None:
    """Raise :class:`UserError` if parameters or buffers are missing."""
    if missing:
        raise UserError(f"{folder}: {min(missing)} is missing ({len(missing)} in all).")


def stored_tensors(model: "PreTrainedModel", folder: Path) -> Iterator[StoredTensor]:
    """Yield the tensors in the safetensors files of a folder, which are not read yet.

    Raises:
        UserError: if the index or a file cannot be read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    names = model.state_dict()
    for path in weight_files(folder):
        with as_user_error(str(path), first_line):
            keys = [*safe_open(path, "pt").keys()]  # type: ignore[no-untyped-call]
        for key in keys:
            name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
            if name not in names:
                name = key
            yield StoredTensor(path, key, name)
