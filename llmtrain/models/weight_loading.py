"""Initial weights of a Hugging Face model on the meta device: from safetensors files, or a seed.

The weights are read or initialised a few at a time, and each rank copies its shards out of full
tensors. So a rank holds its shards and a few tensors, on one process and on many.

``from_pretrained`` (transformers 5.23) converts the names and layouts of published checkpoints in
the same way, but it cannot do the following:

- **Fill a model that is already sharded, or has LoRA.** FSDP2 and peft rename parameters.
- **Shard every checkpoint correctly.** It takes a rank's shard of each stored tensor first, and
  splits or joins tensors afterwards. On two ranks, 24 of the 35 parameters of a small HRM-Text are
  silently wrong, and 2 of the 42 of a small Kimi Linear.
- **Hold a few tensors only.** Joined tensors, such as the weights of experts, are in the memory of
  each rank in full before the model is sharded.
- **Copy float32 weights.** They stay mapped from the file. If the file is overwritten during a run,
  the weights change. If it is truncated, the process dies of a bus error.
- **Refuse a checkpoint that does not fit.** It initialises missing weights, and unties tied weights
  that differ. It only logs both.
- **Initialise the same weights on any number of ranks.**

Quantized models are loaded with it, since they are never sharded
(:mod:`llmtrain.models.model_classes`).
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.interfaces.model import Weights, block_classes
from llmtrain.model_folders import weight_files
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
# Stored tensors are converted together up to this size, because each conversion walks the model.
_BYTES_AT_ONCE = 64 * 2**20


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


class InitialWeights:
    """The initial weights of a model, which remember the model as it was built.

    Later it may get new embeddings, and LoRA renames parameters of the layers that it wraps.

    Args:
        model: the model on the meta device, before any change. Its stored buffers, such as the
            routing biases of DeepSeek-V3, are loaded at once: they are small, and every rank holds
            them in full.
        folder: the folder of the weights; ``None`` for random ones.
        seed: of random weights, and of a ``score`` head that is not stored.
    """

    def __init__(self, model: "PreTrainedModel", folder: Path | None, seed: int) -> None:
        self._original = copy.deepcopy(model)
        self._original_names = {parameter: name for name, parameter in model.named_parameters()}
        # Returns the weights of some of the original model's parameters, by their names.
        self._weights = functools.partial(random_weights, self._original, seed)
        if folder is not None:
            self._weights = functools.partial(
                stored_weights, self._original, folder, head_seed=seed
            )
            tensors = model.state_dict(keep_vars=True)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            buffers = tensors.keys() - parameters.keys()
            for name, buffer in stored_weights(self._original, folder, buffers):
                tensors[name].copy_(buffer)

    def load_embeddings(self, model: "PreTrainedModel") -> None:
        """Load the input and output embeddings of a model.

        The embeddings of new tokens are made from those of the other tokens.
        """
        embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}  # type: ignore[no-untyped-call]
        names = {
            f"{module_name}.{name}"
            for module_name, module in model.named_modules()
            if module in embeddings
            for name, _ in module.named_parameters(recurse=False)
        }
        names &= {*self._original_names.values()}  # a tied head has no weights of its own
        for key, weight in self._weights(names):
            module_name, _, parameter_name = key.rpartition(".")
            # A clone, because `weight` may be mapped from a file that changes during the run.
            parameter = nn.Parameter(weight.clone())
            setattr(model.get_submodule(module_name), parameter_name, parameter)
        model.tie_weights()

    def for_parameters_of(self, trained: nn.Module) -> Weights:
        """Return the initial weights of the parameters that are still on the meta device.

        Args:
            trained: the model after all changes. The weights have its parameters' names.
        """
        new_names = {
            self._original_names[parameter]: name
            for name, parameter in trained.named_parameters()
            if parameter.is_meta and parameter in self._original_names
        }
        return ((new_names[name], weight) for name, weight in self._weights(new_names))


# --- stored weights


def stored_weights(
    model: "PreTrainedModel", folder: Path, names: Collection[str], head_seed: int | None = None
) -> Weights:
    """Yield weights that are stored in the safetensors files of a folder.

    transformers converts the names and layouts of published checkpoints to those of its class.

    Args:
        model: the model, whose parameters are on the meta device. It is unchanged afterwards.
        folder: a folder with ``model.safetensors``, or with several files and their index.
        names: the parameters and buffers to yield. Tied parameters have the name under which the
            model lists them.
        head_seed: the seed of a ``score`` head that is not stored. Without it, that is an error.

    Yields:
        Names with full tensors on the CPU, in the dtypes of the model. Copy each tensor before you
        take the next one, because it may be mapped from its file.

    Raises:
        UserError: if a file cannot be read, if a tensor is missing or has another shape, or if two
            tied parameters are stored with different values.
    """
    tied_names = _tied_names(model)
    tensors = [*stored_tensors(model, folder)]
    differing = tied_but_different(model, tensors)
    if differing is not None:
        raise UserError(
            f"{differing} differs from {tied_names[differing]}, to which it is tied; "
            "set tie_word_embeddings to false in config.json."
        )

    unread = set(names)
    wanted = [tensor for tensor in tensors if tied_names.get(tensor.name, tensor.name) in unread]
    for group in _groups(model, wanted):
        for stored_name, value in _converted(model, folder, group).items():
            name = tied_names.get(stored_name, stored_name)
            if name in unread:  # a tied parameter may be stored twice
                unread.remove(name)
                yield name, value

    if head_seed is not None:
        head = {name for name in unread if name.startswith("score.")}
        yield from random_weights(model, head_seed, head)
        unread -= head
    if unread:
        raise UserError(f"{folder}: {min(unread)} is missing ({len(unread)} in all).")


def tied_but_different(model: nn.Module, tensors: Collection[StoredTensor]) -> str | None:
    """Return a tied parameter that is stored under both of its names, with different values."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, listed_name in _tied_names(model).items():
        is_stored_twice = name in by_name and listed_name in by_name
        if is_stored_twice and not torch.equal(by_name[name].read(), by_name[listed_name].read()):
            return name
    return None


def _groups(model: nn.Module, tensors: Collection[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Yield groups of tensors to convert together. Those of one parameter are in one group."""
    sizes = {name: value.nbytes for name, value in model.state_dict().items()}
    by_name: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        by_name[tensor.name].append(tensor)

    group: list[StoredTensor] = []
    group_bytes = 0
    for name, sources in by_name.items():
        if group and group_bytes + sizes[name] > _BYTES_AT_ONCE:
            yield group
            group = []
            group_bytes = 0
        group.extend(sources)
        group_bytes += sizes[name]
    if group:
        yield group


def _converted(
    model: "PreTrainedModel", folder: Path, tensors: Collection[StoredTensor]
) -> dict[str, Tensor]:
    """Return parameters and buffers of a model, which transformers makes from stored tensors.

    Raises:
        UserError: if a tensor has another shape than its parameter, or cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    # Open the files each time: pages that were read stay in memory until the file closes.
    files = {path: safe_open(path, "pt") for path in {tensor.path for tensor in tensors}}
    slices: dict[str, object] = {}
    for tensor in tensors:
        file = files[tensor.path]
        slices[tensor.key] = file.get_slice(tensor.key)  # type: ignore[no-untyped-call]

    # Conversions remember which tensors they were used for, so each time needs new ones.
    conversions = cast(
        "list[WeightRenaming | WeightConverter]", get_model_conversion_mapping(model)
    )
    settings = LoadStateDictConfig(device_map={"": "cpu"}, weight_mapping=conversions)
    before = model.state_dict(keep_vars=True)
    with _tensors_restored(model):
        result, _ = convert_and_load_state_dict_in_model(model, slices, settings)
        after = model.state_dict(keep_vars=True)

    for key, stored_shape, shape in result.mismatched_keys:
        raise UserError(
            f"{folder}: {key} has the shape {[*stored_shape]}, but the model needs {[*shape]}."
        )
    for error in [*result.conversion_errors.values(), *result.error_msgs]:
        raise UserError(f"{folder}: {first_line(Exception(error))}")
    return {name: after[name].detach() for name in after if after[name] is not before[name]}


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


# --- random weights


def random_weights(
    model: "PreTrainedModel", seed: int, names: Collection[str] | None = None
) -> Weights:
    """Yield random initial weights, as the model's class initialises them.

    The weights of a module depend only on ``seed`` and on the name of the module in the model.
    Every rank can therefore initialise one part at a time and arrive at the same weights.
    A parameter that ``_init_weights`` leaves alone keeps the values that ``__init__`` gives it.

    Args:
        model: the model, on the meta device. It is on the meta device again after each part.
        seed: the seed of the run.
        names: the parameters to yield; all of them by default.

    Yields:
        Names of parameters with full tensors on the CPU, in float32 or wider.

    Raises:
        UserError: if the class does not initialise a parameter.
    """
    listed_names = {parameter: name for name, parameter in model.named_parameters()}
    missing = set(listed_names.values() if names is None else names)
    values_by_owner: dict[type[nn.Module], dict[str, Tensor]] = {}
    for part_name, part in _parts(model):
        own_names = {own: listed_names[p] for own, p in part.named_parameters(part_name)}
        if missing.isdisjoint(own_names.values()):
            continue
        # In its place in the model, because a class may ask for the name of a module.
        with _tensors_restored(part):
            _initialise(model, part_name, part, seed)
            for own_name, parameter in part.named_parameters(part_name):
                name = own_names[own_name]
                if name not in missing:  # a tied parameter belongs to several parts
                    continue
                missing.remove(name)
                tensor = parameter.detach()
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


def _initialise(model: "PreTrainedModel", part_name: str, part: nn.Module, seed: int) -> None:
    """Make the parameters of a part real, and initialise them as the model's class does.

    Parameters that the class leaves alone are NaN afterwards.
    """
    from transformers import PreTrainedModel, initialization

    _fill_with_nan(part)
    # Children come first, because a module may initialise parameters of its children.
    inner = [*part.named_modules(prefix=part_name)]
    outer = []
    name = part_name
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
            torch.default_generator.manual_seed(seed_of(seed, name, part_name))
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


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model that are initialised together, with their names.

    A part is a block, or a module outside the blocks that has parameters itself.
    """
    classes = block_classes(model)
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in blocks):
            continue
        is_block = type(module).__name__ in classes
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if is_block:
            blocks.append(name)
        if is_block or has_parameters:
            yield name, module


# --- names and tensors of the model


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, with the name under which each is listed."""
    listed = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name: listed[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != listed[parameter]
    }


@contextmanager
def _tensors_restored(module: nn.Module) -> Iterator[None]:
    """Restore the present parameters and buffers of a module on exit."""
    tensors = []
    for owner in module.modules():
        for name, tensor in [
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        ]:
            tensors.append((owner, name, tensor))
    try:
        yield
    finally:
        for owner, name, tensor in tensors:
            setattr(owner, name, tensor)
