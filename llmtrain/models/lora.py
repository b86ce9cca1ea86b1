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
from llmtrain.contract import Facts, Weights
from llmtrain.errors import UserError, first_line, refused_as, require
from llmtrain.models.config import LoraConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.untrusted import DATA_ONLY, load_causal_lm, origin_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_ORIGIN = (
    "base.json"  # which weights an adapter belongs to: their name alone can come to mean others
)


def add_lora(
    model: "PreTrainedModel", config: LoraConfig, base: str, seed: int, new_tokens: Sequence[int]
) -> "PeftModel":
    """Put the trained matrices into ``model``, in place, and freeze the rest; returns peft's view, which can save it.

    ``base`` names the weights. ``new_tokens`` are rows of the embedding that they lack, which are trained as well.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--lora_r needs peft: pip install 'llmtrain[lora]'.") from None
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = model.config.get_text_config().tie_word_embeddings
    ends = [
        model.get_input_embeddings(),
        *([] if tied else [head]),
    ]  # rows of new tokens are trained in these matrices
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]
    targets, every = config.lora_target_modules, config.lora_target_modules == ["all-linear"]
    stacks = _fused_experts(model)
    fused = [name for name in stacks if every or any(_means(target, name) for target in targets)]
    bare = not config.lora_dropout and not config.use_dora
    needs = (
        "the fused weights of this model's experts take neither; leave it out, or name modules with"
    )
    require(bare or not fused, f"--lora_dropout and --use_dora: {needs} --lora_target_modules.")
    if fused:
        size = sum(model.get_parameter(name).nbytes for name in fused) / 2**30
        kept = "in each forward pass, and kept for the backward pass (--gradient_checkpointing: those of a block)"
        say("experts", f"their weights with LoRA's added, {size:.2f} GiB, are computed {kept}")
    modules = [target for target in targets if not any(_means(target, name) for name in stacks)]
    modules += [
        target
        for target in targets
        if target not in modules and any(_means(target, name) for name in linear)
    ]
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if every else modules,
        target_parameters=fused or None,
        lora_dropout=config.lora_dropout,
        use_dora=config.use_dora,
        trainable_token_indices={names[end]: [*new_tokens] for end in ends} if new_tokens else None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            _ignore_warnings()
            if (
                fused and model.device.type == "meta"
            ):  # peft takes dense layers for experts by their names
                trial = copy.deepcopy(model)
                peft.get_peft_model(trial, copy.deepcopy(settings))
                lost = [name for name in linear if type(trial.get_submodule(name)) is nn.Linear]
                lost = [
                    name
                    for name in lost
                    if every or any(_means(target, name) for target in targets)
                ]
                settings = replace(
                    settings, target_parameters=[*fused, *(f"{name}.weight" for name in lost)]
                )
            adapted: PeftModel = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora_target_modules {' '.join(targets)}: {first_line(error)}") from None
    taken = [
        name.removesuffix(".lora_A")
        for name, _ in model.named_modules()
        if name.endswith(".lora_A")
    ]
    for target in modules:
        if target != "all-linear" and not any(name.endswith(target) for name in taken):
            raise UserError(f"--lora_target_modules: no module is called {target}.")
    _draw(model, seed)
    if Path(base).is_dir():  # it will be looked for from anywhere
        base = str(Path(base).resolve())
    adapted.peft_config["default"] = replace(
        adapted.peft_config["default"], base_model_name_or_path=base
    )
    return adapted


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


def _means(target: str, name: str) -> bool:
    """Return whether a target names a module or parameter; two products that are fused bear the names of both."""
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
    """Load the base of an adapter's folder with the adapter in it, and an embedding for as many tokens.

    Raises :class:`UserError` where the base is not the one that the adapter was trained on.
    """
    from peft import PeftConfig, PeftModel

    folder = Path(name)
    with refused_as(f"{folder}: its adapter could not be loaded", first_line):
        base = str(PeftConfig.from_pretrained(name).base_model_name_or_path or "")
        require(base, f"{folder} does not say whose adapter it is (base_model_name_or_path).")
        known = json.loads((folder / _ORIGIN).read_text()) if (folder / _ORIGIN).exists() else {}
        same = "sha256" not in known or origin_of(base) == known
        require(
            same, f"{folder} is an adapter of other weights than {base} holds now; put those back."
        )
        model = load_causal_lm(base, dtype=dtype, revision=known.get("commit") or "main")
        if vocabulary > len(cast(nn.Embedding, model.get_input_embeddings()).weight):
            model.resize_token_embeddings(vocabulary)
        with warnings.catch_warnings():
            _ignore_warnings()
            return PeftModel.from_pretrained(model, name)
