"""LoRA: small trained matrices beside frozen weights (Hu et al. 2021, arXiv:2106.09685), made by peft."""

import copy
import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from llmtrain.console import say
from llmtrain.errors import UserError, first_line, refused_as
from llmtrain.models.config import LoraConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.untrusted import DATA_ONLY, load_causal_lm, origin_of
from llmtrain.types import Facts, Weights

if TYPE_CHECKING:
    import peft
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_ORIGIN = (
    "base.json"  # which weights an adapter belongs to: their name alone can come to mean others
)


def add_lora(
    model: "PreTrainedModel", config: LoraConfig, base: str, seed: int, new_tokens: Sequence[int]
) -> "PeftModel":
    """Add LoRA's matrices to a model, in place, and freeze everything else.

    Args:
        model: The base model.
        config: The size and the places of the matrices.
        base: The folder or hub name of the base's weights.
        seed: Of the initial values of the matrices.
        new_tokens: Tokens that the base has no embeddings for. Their rows are trained, too.

    Returns:
        peft's view of the model, which can save the adapter.

    Raises:
        UserError: If peft is not installed, or if ``--lora_target_modules`` does not fit the model.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--lora_r needs peft: pip install 'llmtrain[lora]'.") from None

    targets = config.lora_target_modules
    all_linear = targets == ["all-linear"]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]
    stacks = _fused_experts(model)
    fused = [name for name in stacks if all_linear or _is_target(name, targets)]
    if fused and (config.lora_dropout or config.use_dora):
        raise UserError(
            "--lora_dropout and --use_dora: the fused weights of this model's experts take neither; leave them out, or "
            "name other modules with --lora_target_modules."
        )
    if fused:
        size = sum(model.get_parameter(name).nbytes for name in fused) / 2**30
        say(
            "experts",
            f"their weights with LoRA's added, {size:.2f} GiB, are computed in each forward pass, and kept for the "
            "backward pass (with --gradient_checkpointing, those of one block)",
        )

    modules = _module_targets(targets, linear, stacks)
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if all_linear else modules,
        target_parameters=fused or None,
        lora_dropout=config.lora_dropout,
        use_dora=config.use_dora,
        trainable_token_indices=_token_rows(model, new_tokens),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            _ignore_warnings()
            if fused and model.device.type == "meta":
                lost = _lost_layers(model, settings, linear)
                lost = [name for name in lost if all_linear or _is_target(name, targets)]
                parameters = [*fused, *(f"{name}.weight" for name in lost)]
                settings = replace(settings, target_parameters=parameters)
            adapted: PeftModel = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora_target_modules {' '.join(targets)}: {first_line(error)}") from None

    adapted_names = [
        name.removesuffix(".lora_A")
        for name, _ in model.named_modules()
        if name.endswith(".lora_A")
    ]
    for target in modules:
        if target != "all-linear" and not any(name.endswith(target) for name in adapted_names):
            raise UserError(f"--lora_target_modules: no module is called {target}.")

    _draw(model, seed)
    if Path(base).is_dir():
        base = str(Path(base).resolve())  # the adapter may be loaded from another working directory
    adapted.peft_config["default"] = replace(
        adapted.peft_config["default"], base_model_name_or_path=base
    )
    return adapted


def _module_targets(targets: list[str], linear: list[str], stacks: list[str]) -> list[str]:
    """Return the targets that are modules, not only parameters of fused experts.

    Args:
        targets: ``--lora_target_modules``.
        linear: The names of the linear layers.
        stacks: The names of the parameters of fused experts.
    """
    modules = [target for target in targets if not any(_means(target, name) for name in stacks)]
    # A name may mean both, such as gate_proj if some layers are dense.
    for target in targets:
        if target not in modules and any(_means(target, name) for name in linear):
            modules.append(target)
    return modules


def _token_rows(model: "PreTrainedModel", new_tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """Return the rows of the embeddings that new tokens train, by the name of the embedding's module."""
    if not new_tokens:
        return None
    embeddings: list[nn.Module] = [model.get_input_embeddings()]
    if not model.config.get_text_config().tie_word_embeddings:
        embeddings.append(model.get_output_embeddings())  # type: ignore[no-untyped-call]
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[embedding]: list(new_tokens) for embedding in embeddings}


def _lost_layers(
    model: "PreTrainedModel", settings: "peft.LoraConfig", linear: list[str]
) -> list[str]:
    """Return the linear layers that get no adapter, because their names are those of fused experts.

    peft takes a layer's name for the experts' parameters, also in blocks where the layer is dense.
    """
    import peft

    trial = copy.deepcopy(model)
    peft.get_peft_model(trial, copy.deepcopy(settings))
    return [name for name in linear if type(trial.get_submodule(name)) is nn.Linear]


def _ignore_warnings() -> None:
    """Ignore that the ranks of fused weights match no module (they are parameters' ranks), and a deprecated name."""
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def _fused_experts(model: nn.Module) -> list[str]:
    """Return the names of the parameters that hold a matrix of each expert, [E, in, out] or [E, out, in].

    A convolution's are no matrices, nor are vectors with dimensions of one.
    """
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
        and min(parameter.shape) > 1
        and not type(module).__module__.startswith("torch.nn.")
    ]


def _is_target(name: str, targets: list[str]) -> bool:
    """Return whether one of the targets names a module or parameter."""
    return any(_means(target, name) for target in targets)


def _means(target: str, name: str) -> bool:
    """Return whether a target names a module or parameter; a fused ``gate_up_proj`` has the names of both its parts."""
    fused = name.endswith(".gate_up_proj") and target in ("gate_proj", "up_proj")
    return fused or f".{name}".endswith(f".{target}")


def _draw(model: nn.Module, seed: int) -> None:
    """Draw matrices that depend on the seed and their place alone; they are real, also in a model on meta."""
    from peft.tuners.lora import LoraLayer

    layers = [
        module
        for module in model.modules()
        if isinstance(module, LoraLayer) and isinstance(module, nn.Module)
    ]
    for number, layer in enumerate(layers):
        for own in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
            if any(parameter.is_meta for parameter in own.parameters()):
                own.to_empty(device="cpu")
        torch.manual_seed((seed + (number << 32)) % 2**63)
        layer.reset_lora_parameters("default", True)  # type: ignore[no-untyped-call]


def with_magnitudes(model: nn.Module, weights: Weights) -> Weights:
    """Yield weights, and the magnitudes that DoRA begins with: the norms of the rows of the weight beside them."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "lora_magnitude_vector", None)
    }
    for name, whole in weights:
        yield name, whole
        layer = name.removesuffix(".base_layer.weight")
        if layer in layers and layer != name:
            rows = whole.T if layers[layer].fan_in_fan_out else whole
            yield (
                f"{layer}.lora_magnitude_vector.default.weight",
                torch.linalg.norm(rows, dim=1).to(whole.dtype),
            )


@dataclass(frozen=True, kw_only=True)
class AdapterFiles(ModelFiles):
    """A model folder in peft's format: the adapter alone, and the name of its base."""

    adapted: "PeftModel"
    origin: Facts  # of the base

    weights: ClassVar[str] = "adapter_model.safetensors"
    divisible: ClassVar[bool] = False

    def write_config(self, folder: Path) -> None:
        """Write the adapter's settings, and which weights it belongs to."""
        self.adapted.peft_config["default"].save_pretrained(str(folder))
        (folder / _ORIGIN).write_text(json.dumps(self.origin) + "\n")

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the adapter's own tensors, by peft's names."""
        from peft import get_peft_model_state_dict

        return cast(
            dict[str, Tensor], get_peft_model_state_dict(self.adapted, save_embedding_layers=False)
        )

    def published(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors unchanged."""
        return tensors

    def title(self, parameters: int) -> str:
        """Return the title of the model card."""
        return f"A LoRA adapter of {parameters:,} parameters for a {self.config['model_type']}"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / "adapter_config.json").exists()


def write_merged(adapter: Path, folder: Path) -> None:
    """Write one model of an adapter and its base: weights that compute the same logits, in float32."""
    from transformers import AutoTokenizer

    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(adapter, **DATA_ONLY))
    adapted = adapted_model(str(adapter), len(tokenizer), torch.float32)
    base = adapted.peft_config["default"].base_model_name_or_path
    merged: PreTrainedModel = adapted.merge_and_unload()
    files = ModelFiles(merged.config.to_dict(), tokenizer, "the data of its adapter", base)
    files.write(folder, merged.num_parameters())
    merged.save_pretrained(folder)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)


def adapted_model(name: str, vocabulary: int, dtype: "torch.dtype | str" = "auto") -> "PeftModel":
    """Load an adapter with its base model.

    Args:
        name: The adapter's folder.
        vocabulary: The number of tokens that the embeddings need rows for.
        dtype: The type of the base's weights; ``auto``: as they are stored.

    Raises:
        UserError: If the base is not the one that the adapter was trained on, or if either cannot be loaded.
    """
    from peft import PeftConfig, PeftModel

    folder = Path(name)
    with refused_as(f"{folder}: its adapter could not be loaded", first_line):
        base = str(PeftConfig.from_pretrained(name).base_model_name_or_path or "")
        if not base:
            raise UserError(
                f"{folder} does not name the model that it adapts; set base_model_name_or_path in adapter_config.json."
            )
        origin = {}
        if (folder / _ORIGIN).exists():
            origin = json.loads((folder / _ORIGIN).read_text())
        if "sha256" in origin and origin_of(base) != origin:
            raise UserError(
                f"{folder} is an adapter of other weights than {base} holds now; put those back."
            )

        model = load_causal_lm(base, dtype=dtype, revision=origin.get("commit") or "main")
        if vocabulary > len(cast(nn.Embedding, model.get_input_embeddings()).weight):
            model.resize_token_embeddings(vocabulary)
        with warnings.catch_warnings():
            _ignore_warnings()
            return PeftModel.from_pretrained(model, name)
