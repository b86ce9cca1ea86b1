"""LoRA: small trained matrices next to frozen weights (Hu et al. 2021, arXiv:2106.09685).

peft adds them to the model.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, write_json
from llmtrain.interfaces.model import Weights
from llmtrain.model_folders import ADAPTER_WEIGHTS
from llmtrain.models.export import ModelFiles, auto_class_of, gives_scores
from llmtrain.models.hub_models import cast_weights
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.text_tower import BASE_FILE
from llmtrain.seeds import seed_of

if TYPE_CHECKING:
    import peft
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_lora(
    model: "PreTrainedModel",
    config: LoraConfig,
    seed: int,
    new_tokens: Sequence[int],
    is_reward_model: bool = False,
) -> "PeftModel":
    """Add LoRA's matrices to a model, in place, and freeze everything else.

    The modules of ``--lora_modules_to_save`` are trained in full, and so is the head of a reward
    model: peft copies them.

    Args:
        model: the base model.
        config: how large the matrices are, and which modules get them.
        seed: of the initial values of the matrices.
        new_tokens: tokens that the base has no embeddings for. Their embeddings are trained, too.
        is_reward_model: whether the model scores answers.

    Returns:
        peft's view of the model, which can save the adapter.

    Raises:
        UserError: if ``--lora_target_modules`` does not fit the model.
    """
    import peft

    _check_modules_to_save(model, config)
    module_targets, expert_targets = _targets(model, config.lora_target_modules)
    if expert_targets and (config.lora_dropout or config.use_dora):
        raise UserError(
            "--lora_dropout and --use_dora: the fused weights of this model's experts take "
            "neither; leave them out, or name other modules with --lora_target_modules."
        )
    # Some classes of transformers are linear layers that also choose the experts of each token.
    routers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__name__.endswith("Router")
    ]
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=module_targets,
        exclude_modules=routers or None,
        lora_dropout=config.lora_dropout,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        modules_to_save=[*config.lora_modules_to_save] or None,
        trainable_token_indices=_token_rows(model, new_tokens, config.lora_modules_to_save),
        task_type="SEQ_CLS" if is_reward_model else "CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # what matters is checked here
            if expert_targets:
                settings = _with_experts(model, settings, expert_targets)
            adapted: PeftModel = peft.get_peft_model(model, settings)
    except (ValueError, TypeError) as error:
        targets = " ".join(config.lora_target_modules)
        raise UserError(f"--lora_target_modules {targets}: {first_line(error)}") from None

    _initialise(model, seed)
    # Also if the base has fewer bits.
    cast_weights(model, torch.float32)
    return adapted


def _targets(model: "PreTrainedModel", targets: list[str]) -> tuple[list[str] | str, list[str]]:
    """Return the modules and the parameters of fused experts that get matrices.

    A target may match both, such as gate_proj if some blocks are dense.

    Raises:
        UserError: if a target matches nothing.
    """
    expert_parameters = _expert_parameter_names(model)
    if targets == ["all-linear"]:
        return "all-linear", expert_parameters

    module_targets = []
    expert_targets: set[str] = set()
    for target in targets:
        experts = [name for name in expert_parameters if _matches(target, name)]
        expert_targets.update(experts)
        if any(_matches(target, name) for name, _ in model.named_modules()):
            module_targets.append(target)
        elif not experts:
            raise UserError(f"--lora_target_modules: no module is called {target}.")
    return module_targets, sorted(expert_targets)


def _with_experts(
    model: "PreTrainedModel", settings: "peft.LoraConfig", experts: list[str]
) -> "peft.LoraConfig":
    """Return settings for a model with fused experts, some blocks of which may be dense.

    peft takes a linear layer with the name of an expert's product for a parameter of the experts,
    and would give it no matrices. So its weight is named as a parameter, too.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(settings)
    convert_peft_config_for_transformers(converted, model=model, conversions=None)
    if converted.target_modules == "all-linear":
        return replace(settings, target_parameters=experts)

    targets = cast(Collection[str], settings.target_modules)
    kept_targets = cast(Collection[str], converted.target_modules)
    heads = {model.get_output_embeddings(), getattr(model, "score", None)}  # type: ignore[no-untyped-call]
    lost_layers = []
    for name, module in model.named_modules():
        is_layer = type(module) is nn.Linear and module not in heads
        is_target = targets == "all-linear" or any(_matches(target, name) for target in targets)
        is_kept = any(_matches(target, name) for target in kept_targets)
        if is_layer and is_target and not is_kept:
            lost_layers.append(f"{name}.weight")
    return replace(settings, target_parameters=[*experts, *lost_layers])


def _check_modules_to_save(model: "PreTrainedModel", config: LoraConfig) -> None:
    """Raise :class:`UserError` if a module of ``--lora_modules_to_save`` cannot be copied."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    is_tied = head is not None and head.weight is embedding.weight
    for target in config.lora_modules_to_save:
        matching = [module for name, module in model.named_modules() if name.endswith(target)]
        if not matching:
            raise UserError(f"--lora_modules_to_save: no module is called {target}.")
        if is_tied and (embedding in matching or head in matching):
            raise UserError(
                f"--lora_modules_to_save {target}: the embedding and the head of this model share "
                "their weights, and a copy of one would part them; leave it out."
            )


def _token_rows(
    model: "PreTrainedModel", new_tokens: Sequence[int], trained_modules: Sequence[str]
) -> dict[str, list[int]] | None:
    """Return the rows that new tokens have in each embedding, by the name of its module.

    An embedding that is trained in full is left out.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rows = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        has_rows = module is embedding or (module is head and head.weight is not embedding.weight)
        if has_rows and new_tokens and name not in trained_modules:
            rows[name] = [*new_tokens]
    return rows or None


def _expert_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that hold the fused weights of experts.

    They have a matrix for each expert: [E, in, out] or [E, out, in]. The weight of a convolution
    has three dimensions, too, but its module is one of torch's. A parameter with a dimension of
    size 1 holds vectors.
    """
    names = []
    for module_name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and min(parameter.shape) > 1:
                names.append(f"{module_name}.{name}")
    return names


def _matches(target: str, name: str) -> bool:
    """Return whether a target is the end of the name of a module or parameter.

    The fused ``gate_up_proj`` also matches the names of its two parts.
    """
    if name.endswith(".gate_up_proj") and target in ("gate_proj", "up_proj"):
        return True
    return f".{name}".endswith(f".{target}")


def _initialise(model: nn.Module, seed: int) -> None:
    """Initialise LoRA's matrices, from the seed and the name of the layer only.

    Afterwards they are real tensors, also if the model is on the meta device.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            matrices: nn.Module = getattr(layer, part)
            if any(parameter.is_meta for parameter in matrices.parameters()):
                matrices.to_empty(device="cpu")
        torch.manual_seed(seed_of(seed, "lora", name))
        layer.reset_lora_parameters("default", True)  # type: ignore[no-untyped-call]


def with_adapter_weights(model: nn.Module, weights: Weights) -> Weights:
    """Return weights, and initial values of an adapter's parameters that follow from them.

    After the weight of a layer with DoRA come its magnitudes, which are the norms of the rows of a
    matrix, or of the columns of an embedding. A tied weight comes once for both of its layers. The
    parameters of a module that is trained in full come twice, also for its copy. Parameters of
    an adapter that is trained further have their values already.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    empty = {name for name, parameter in parameters.items() if parameter.is_meta}
    tied_names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        tied_names[parameter].append(name)

    def stream() -> Weights:
        for first_name, weight in weights:
            yield first_name, weight
            for name in tied_names[parameters[first_name]]:
                copy_name = name.replace(".original_module.", ".modules_to_save.default.")
                if copy_name != name and copy_name in empty:
                    yield copy_name, weight
                layer_name = name.removesuffix(".base_layer.weight")
                magnitudes_name = f"{layer_name}.lora_magnitude_vector.default.weight"
                if magnitudes_name in empty:
                    dora = model.get_submodule(magnitudes_name.removesuffix(".weight"))
                    rows = weight.T if dora.fan_in_fan_out else weight
                    yield magnitudes_name, torch.linalg.norm(rows, dim=1).to(weight.dtype)

    return stream()


@dataclass(frozen=True, kw_only=True)
class AdapterFiles(ModelFiles):
    """The folder of an adapter in peft's format, with the name of its base.

    Attributes:
        adapted: peft's view of the model.
        origin: identifies the weights of the base.
    """

    adapted: "PeftModel"
    origin: JsonObject

    weights_name: ClassVar[str] = ADAPTER_WEIGHTS
    may_split_weights: ClassVar[bool] = False
    library: ClassVar[str] = "peft"
    kind: ClassVar[str] = "LoRA adapter"

    def write_config(self, folder: Path) -> None:
        """Write the adapter's settings with the name of its base, and the origin of that."""
        base = str(self.base)
        settings = cast("peft.LoraConfig", self.adapted.peft_config["default"])
        settings = replace(
            settings,
            # Absolute, because the adapter may be loaded from another working directory.
            base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
            revision=self.origin.get("commit"),
            # peft names the head of a reward model again each time.
            modules_to_save=[*dict.fromkeys(settings.modules_to_save or ())] or None,
        )
        settings.save_pretrained(str(folder))
        write_json(folder / BASE_FILE, self.origin, durable=False)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the adapter's tensors by peft's names."""
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(self.adapted, save_embedding_layers=False)
        return cast(dict[str, Tensor], tensors)

    def loading_code(self) -> str:
        """Return Python code that loads the adapter and its base."""
        auto_class = auto_class_of(self.config)
        is_reward_model = gives_scores(self.config)
        options = ", num_labels=1" if is_reward_model else ""
        code = (
            "from peft import PeftConfig, PeftModel\n"
            f"from transformers import {auto_class}, AutoTokenizer\n\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
            "settings = PeftConfig.from_pretrained(FOLDER)\n"
            f"base = {auto_class}.from_pretrained(\n"
            '    settings.base_model_name_or_path, revision=settings.revision or "main"'
            f"{options}\n)\n"
            "rows = len(base.get_input_embeddings().weight)\n"
            "base.resize_token_embeddings(max(rows, len(tokenizer)))\n"
            "model = PeftModel.from_pretrained(base, FOLDER)\n"
        )
        if is_reward_model and self.tokenizer is not None:
            code += "model.config.pad_token_id = tokenizer.pad_token_id  # not that of the base\n"
        return code
