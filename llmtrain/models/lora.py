"""LoRA: small trained matrices next to frozen weights (Hu et al. 2021, arXiv:2106.09685).

peft adds them to the model.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import write_json
from llmtrain.interfaces.model_bundle import Weights
from llmtrain.json_types import JsonObject
from llmtrain.model_folders import ADAPTER_WEIGHTS
from llmtrain.models.adapters import ignore_peft_warnings
from llmtrain.models.dtypes import cast_weights
from llmtrain.models.export import (
    MULTIMODAL_CLASSES,
    ModelFiles,
    auto_class_of,
    auto_peft_class,
    gives_scores,
)
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
    base: str,
    seed: int,
    new_tokens: Sequence[int],
    is_reward_model: bool = False,
    base_commit: str | None = None,
) -> "PeftModel":
    """Add LoRA's matrices to a model, in place, and freeze everything else.

    The modules of ``--lora_modules_to_save`` are trained in full, and so is the head of a reward
    model: peft copies them.

    Args:
        model: the base model.
        config: how large the matrices are, and which modules get them.
        base: the folder or hub name of the base's weights.
        seed: of the initial values of the matrices.
        new_tokens: tokens that the base has no embeddings for. Their embeddings are trained, too.
        is_reward_model: whether the model scores answers.
        base_commit: the commit of the base on the hub, for peft; ``None`` for a folder.

    Returns:
        peft's view of the model, which can save the adapter.

    Raises:
        UserError: if peft is not installed, or ``--lora_target_modules`` does not fit the model.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--lora_r needs peft: pip install 'llmtrain[lora]'.") from None

    _check_modules_to_save(model, config)
    targets = config.lora_target_modules
    is_all_linear = targets == ["all-linear"]
    linear_layers = _linear_layers(model)
    expert_names = _expert_parameter_names(model)
    expert_targets = [name for name in expert_names if is_all_linear or _is_target(name, targets)]
    _check_expert_targets(model, config, expert_targets)

    module_targets = _module_targets(targets, linear_layers, expert_names)
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if is_all_linear else module_targets,
        exclude_modules=_routers(model) or None,
        target_parameters=expert_targets or None,
        lora_dropout=config.lora_dropout,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        modules_to_save=[*config.lora_modules_to_save] or None,
        trainable_token_indices=_token_rows(model, new_tokens, config.lora_modules_to_save),
        task_type="SEQ_CLS" if is_reward_model else "CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            ignore_peft_warnings()
            if expert_targets and model.device.type == "meta":
                lost_layers = _lost_layers(model, settings, linear_layers)
                if not is_all_linear:
                    lost_layers = [name for name in lost_layers if _is_target(name, targets)]
                parameters = [*expert_targets, *(f"{name}.weight" for name in lost_layers)]
                settings = replace(settings, target_parameters=parameters)
            adapted: PeftModel = peft.get_peft_model(model, settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"--lora_target_modules {' '.join(targets)}: {first_line(error)}") from None
    _check_module_targets(model, module_targets)

    _initialise(model, seed)
    # Also if the base has fewer bits.
    cast_weights(model, torch.float32)
    set_base(adapted, base, base_commit)
    return adapted


def set_base(adapted: "PeftModel", base: str, base_commit: str | None) -> None:
    """Let an adapter's settings name its base.

    Args:
        adapted: peft's view of the model.
        base: the folder or hub name of the base's weights.
        base_commit: the commit of the base on the hub; ``None`` for a folder.
    """
    if Path(base).is_dir():
        # Absolute, because the adapter may be loaded from another working directory.
        base = str(Path(base).resolve())
    settings = cast("peft.LoraConfig", adapted.peft_config["default"])
    # peft names the head of a reward model again each time.
    modules = [*dict.fromkeys(settings.modules_to_save or ())] or None
    adapted.peft_config["default"] = replace(
        settings,
        base_model_name_or_path=base,
        revision=base_commit,
        modules_to_save=modules,
    )


def _linear_layers(model: "PreTrainedModel") -> list[str]:
    """Return the names of the linear layers, without the output head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]


def _routers(model: "PreTrainedModel") -> list[str]:
    """Return the names of linear layers that return more than a product.

    Some classes of transformers are linear layers that also choose the experts of each token.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).__module__.startswith("transformers.")
        and not _returns_a_tensor(module)
    ]


@torch.no_grad()
def _returns_a_tensor(module: nn.Linear) -> bool:
    """Return whether a linear layer, which may be on the meta device, returns a single tensor."""
    return isinstance(module(module.weight.new_empty(1, module.in_features)), Tensor)


def _check_expert_targets(
    model: "PreTrainedModel", config: LoraConfig, expert_targets: list[str]
) -> None:
    """Check that fused experts can have LoRA as it is configured, and log its memory."""
    if not expert_targets:
        return
    if config.lora_dropout or config.use_dora:
        raise UserError(
            "--lora_dropout and --use_dora: the fused weights of this model's experts take "
            "neither; leave them out, or name other modules with --lora_target_modules."
        )
    size = sum(model.get_parameter(name).nbytes for name in expert_targets) / 2**30
    say(
        "experts",
        f"each forward pass adds LoRA's matrices to their weights; the sums, {size:.2f} GiB, are "
        "kept for the backward pass (with --gradient_checkpointing, only those of one block)",
    )


def _check_module_targets(model: "PreTrainedModel", module_targets: list[str]) -> None:
    """Raise :class:`UserError` if a target is the name of no module that has got an adapter."""
    adapted_names = [
        name.removesuffix(".lora_A")
        for name, _ in model.named_modules()
        if name.endswith(".lora_A")
    ]
    for target in module_targets:
        has_adapter = any(f".{name}".endswith(f".{target}") for name in adapted_names)
        if target != "all-linear" and not has_adapter:
            raise UserError(f"--lora_target_modules: no module is called {target}.")


def _module_targets(
    targets: list[str], linear_layers: list[str], expert_names: list[str]
) -> list[str]:
    """Return the targets that are modules, not only parameters of fused experts.

    Args:
        targets: ``--lora_target_modules``.
        linear_layers: the names of the linear layers.
        expert_names: the names of the parameters of fused experts.
    """
    modules = [
        target for target in targets if not any(_matches(target, name) for name in expert_names)
    ]
    # A target may match both, such as gate_proj if some layers are dense.
    for target in targets:
        if target not in modules and any(_matches(target, name) for name in linear_layers):
            modules.append(target)
    return modules


def _check_modules_to_save(model: "PreTrainedModel", config: LoraConfig) -> None:
    """Raise :class:`UserError` if a module of ``--lora_modules_to_save`` cannot be copied."""
    modules = dict(model.named_modules())
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}  # type: ignore[no-untyped-call]
    for target in config.lora_modules_to_save:
        matching = [module for name, module in modules.items() if name.endswith(target)]
        if not matching:
            raise UserError(f"--lora_modules_to_save: no module is called {target}.")
        if _has_tied_head(model) and embeddings.intersection(matching):
            raise UserError(
                f"--lora_modules_to_save {target}: the embedding and the head of this model share "
                "their weights, and a copy of one would part them; leave it out."
            )


def _has_tied_head(model: "PreTrainedModel") -> bool:
    """Return whether the head of a model has the weights of its embedding."""
    head = cast("nn.Linear | None", model.get_output_embeddings())  # type: ignore[no-untyped-call]
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    return head is not None and head.weight is embedding.weight


def _token_rows(
    model: "PreTrainedModel", new_tokens: Sequence[int], trained_modules: Sequence[str]
) -> dict[str, list[int]] | None:
    """Return the rows that new tokens have in each embedding, by the name of its module.

    An embedding that is trained in full is left out.
    """
    if not new_tokens:
        return None
    embeddings: list[nn.Module] = [model.get_input_embeddings()]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call] # None: a reward model
    if head is not None and not _has_tied_head(model):
        embeddings.append(head)
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    rows = {names[embedding]: list(new_tokens) for embedding in embeddings}
    return {name: tokens for name, tokens in rows.items() if name not in trained_modules} or None


def _lost_layers(
    model: "PreTrainedModel", settings: "peft.LoraConfig", linear_layers: list[str]
) -> list[str]:
    """Return the linear layers that peft would give no adapter.

    If the name of a layer is also one of fused experts, peft takes it for the experts' parameters,
    also in blocks where the layer is dense.
    """
    import peft

    trial = copy.deepcopy(model)
    peft.get_peft_model(trial, copy.deepcopy(settings))
    return [name for name in linear_layers if type(trial.get_submodule(name)) is nn.Linear]


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


def _is_target(name: str, targets: list[str]) -> bool:
    """Return whether one of the targets matches a module or parameter."""
    return any(_matches(target, name) for target in targets)


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

    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, layer in layers.items():
        for matrices in (
            layer.lora_A,
            layer.lora_B,
            layer.lora_embedding_A,
            layer.lora_embedding_B,
        ):
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
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    layers = dict(model.named_modules())
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    tied_names = {names[0]: names for names in names_of.values()}

    def stream() -> Weights:
        for first_name, weight in weights:
            yield first_name, weight
            for name in tied_names[first_name]:
                copy_name = name.replace(".original_module.", ".modules_to_save.default.")
                if copy_name != name and copy_name in empty:
                    yield copy_name, weight
                layer_name = name.removesuffix(".base_layer.weight")
                magnitudes_name = f"{layer_name}.lora_magnitude_vector.default.weight"
                if magnitudes_name in empty:
                    dora = layers[magnitudes_name.removesuffix(".weight")]
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

    def trained_in(self, dtype: torch.dtype) -> "AdapterFiles":
        """Return these files: an adapter's settings name no dtype."""
        return self

    def write_config(self, folder: Path) -> None:
        """Write the adapter's settings, and the origin of its base."""
        self.adapted.peft_config["default"].save_pretrained(str(folder))
        write_json(folder / BASE_FILE, self.origin, durable=False)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the adapter's tensors by peft's names."""
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(self.adapted, save_embedding_layers=False)
        return cast(dict[str, Tensor], tensors)

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors unchanged."""
        return tensors

    def loading_code(self) -> str:
        """Return Python code that loads the adapter and its base. A reward model also scores."""
        auto_class = auto_class_of(self.config)
        if auto_class in MULTIMODAL_CLASSES:  # which no class of peft loads in full
            revision = ", revision=settings.revision" if "commit" in self.origin else ""
            return (
                "from peft import PeftConfig, PeftModel\n"
                f"from transformers import {auto_class}, AutoTokenizer\n\n"
                "settings = PeftConfig.from_pretrained(FOLDER)\n"
                "name = settings.base_model_name_or_path\n"
                f"base = {auto_class}.from_pretrained(name{revision})\n"
                "model = PeftModel.from_pretrained(base, FOLDER)\n"
                "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
            )

        auto_class = auto_peft_class(self.config)
        is_reward_model = gives_scores(self.config)
        options = ", num_labels=1" if is_reward_model else ""
        code = (
            f"from peft import {auto_class}\nfrom transformers import AutoTokenizer\n\n"
            f"model = {auto_class}.from_pretrained(FOLDER{options})\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        )
        if is_reward_model and self.tokenizer is not None:
            code += "model.config.pad_token_id = tokenizer.pad_token_id  # not that of the base\n"
            code += self.scoring_code()
        return code

    def title(self, parameters: int) -> str:
        """Return the title of the model card."""
        return f"A LoRA adapter of {parameters:,} parameters for a {self.config['model_type']}"
