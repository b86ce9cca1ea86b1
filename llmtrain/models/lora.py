"""LoRA: small trained matrices beside frozen weights (Hu et al. 2021, arXiv:2106.09685), made by peft."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from llmtrain.config import Config, flag, require, require_at_least
from llmtrain.errors import UserError, first_line
from llmtrain.models.export import ModelFiles
from llmtrain.models.streaming import Weights
from llmtrain.models.untrusted import DATA_ONLY, WEIGHTS_ONLY, origin_of, refuse_pickles

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


_ORIGIN = "base.json"  # which weights an adapter belongs to: their name alone can come to mean others


@dataclass
class LoraConfig(Config):
    """The adapter that is trained in place of a model (Hu et al. 2021, arXiv:2106.09685). Each field is a flag."""

    _argument_group_name: ClassVar[str] = "LoRA"
    acts: ClassVar[str] = "model"

    lora_r: int = flag(0, "rank of the trained matrices; 0 trains the model itself")
    lora_alpha: int = flag(32, "their product is scaled by alpha / r")
    lora_target_modules: list[str] = flag(["all-linear"], "modules beside which they stand, by the end of their names")
    lora_dropout: float = flag(0.0, "share of their inputs dropped")
    use_rslora: bool = flag(False, "scale by alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732)")
    use_dora: bool = flag(False, "train magnitudes apart from directions (Liu et al. 2024, arXiv:2402.09353)")

    def __post_init__(self) -> None:
        require_at_least(self, 0, "lora_r")
        idle = not self.lora_r and (self.lora_dropout or self.use_rslora or self.use_dora)
        require(not idle, "--lora_dropout, --use_rslora and --use_dora need --lora_r.")
        whole = "all-linear" not in self.lora_target_modules or len(self.lora_target_modules) == 1
        require(whole, "--lora_target_modules: all-linear is all of them; name no others beside it.")
        require(self.lora_alpha > 0, f"--lora_alpha {self.lora_alpha} must be above 0.")
        require(0 <= self.lora_dropout < 1, f"--lora_dropout {self.lora_dropout} must be at least 0 and below 1.")


def add_lora(
    model: "PreTrainedModel", config: LoraConfig, base: str | None, seed: int, new_tokens: list[int]
) -> "PeftModel":
    """Put the trained matrices into ``model``, in place, and freeze the rest. ``new_tokens`` are rows of the embedding
    that the base does not have, which are trained as well. Returns peft's view of it, which knows its format."""
    require(base is not None, "--lora_r needs --model_name_or_path: random weights are not worth keeping.")
    try:
        import peft
    except ImportError:
        raise UserError("--lora_r needs peft: pip install 'llmtrain[lora]'.") from None
    targets = config.lora_target_modules
    settings = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets[0] if len(targets) == 1 and targets[0] == "all-linear" else targets,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        trainable_token_indices=_both_ends(model, new_tokens) if new_tokens else None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora_target_modules {' '.join(targets)}: {first_line(error)}") from None
    names = [name for name, _ in model.named_modules() if name.endswith("lora_A")]
    for target in targets:
        if target != "all-linear" and not any(name.removesuffix(".lora_A").endswith(target) for name in names):
            raise UserError(f"--lora_target_modules: no module is called {target}.")
    _draw(model, seed)
    place = str(Path(str(base)).resolve()) if Path(str(base)).is_dir() else base  # it will be looked for from anywhere
    adapted.peft_config["default"] = replace(adapted.peft_config["default"], base_model_name_or_path=place)
    return adapted


def _draw(model: "PreTrainedModel", seed: int) -> None:
    """Random matrices that depend on the seed and their place alone; real ones, also in a model without memory."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for number, layer in enumerate(layers):
        for name, parameter in [*layer.named_parameters()]:
            if parameter.is_meta and not name.startswith(("base_layer", "lora_magnitude_vector")):
                place, _, leaf = name.rpartition(".")
                real = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                setattr(layer.get_submodule(place), leaf, real)
        torch.manual_seed((seed + (number << 32)) % 2**63)
        layer.reset_lora_parameters("default", True)


def with_magnitudes(model: "PreTrainedModel", weights: Weights) -> Weights:
    """Weights for a model without memory, and what DoRA begins with: the norm of each row of a weight beside which it
    stands."""
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if getattr(m, "lora_magnitude_vector", None)}
    for name, whole in weights:
        yield name, whole
        layer = name.removesuffix(".base_layer.weight")
        if layer in layers and layer != name:
            rows = whole.T if layers[layer].fan_in_fan_out else whole
            yield f"{layer}.lora_magnitude_vector.default.weight", torch.linalg.norm(rows, dim=1).to(whole.dtype)


def _both_ends(model: "PreTrainedModel", tokens: list[int]) -> dict[str, list[int]]:
    """The matrices in which rows of new tokens are trained: the embedding, and the head where it is another."""
    ends = [model.get_input_embeddings()]
    if not model.config.get_text_config().tie_word_embeddings:
        ends.append(model.get_output_embeddings())
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[end]: tokens for end in ends}


@dataclass(frozen=True)
class AdapterFiles(ModelFiles):
    """A model folder in peft's format: the adapter alone, and whose it is."""

    adapted: "PeftModel | None" = None
    origin: dict[str, Any] = field(default_factory=dict)  # of the base
    weights: ClassVar[str] = "adapter_model.safetensors"
    divisible: ClassVar[bool] = False

    def write(self, folder: Path, parameters: int) -> None:
        assert self.adapted is not None
        self.write_beside(folder, parameters)
        self.adapted.peft_config["default"].save_pretrained(str(folder))
        (folder / _ORIGIN).write_text(json.dumps(self.origin) + "\n")

    def _title(self, parameters: int) -> str:
        return f"A LoRA adapter of {parameters:,} parameters for a {self.config['model_type']}"

    def tensors(self, model: Any) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        assert self.adapted is not None
        return get_peft_model_state_dict(self.adapted, save_embedding_layers=False)

    def exported(self, model: Any) -> dict[str, torch.Tensor]:
        return self.tensors(model)

    def publishing(self, model: Any) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
        return lambda name, whole: {name: whole}


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def write_merged(adapter: Path, folder: Path) -> None:
    """One model of an adapter and its base: weights that compute the same logits, in float32."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(adapter, **DATA_ONLY)
    adapted = adapted_model(str(adapter), len(tokenizer), torch.float32)
    base = adapted.peft_config["default"].base_model_name_or_path
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = ModelFiles(merged.config.to_dict(), tokenizer, "the data of its adapter", base).card(merged.num_parameters())
    (folder / "README.md").write_text(card)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)


def adapted_model(folder: str, vocabulary: int, dtype: Any = "auto") -> Any:
    """The base of an adapter's folder with the adapter in it, and an embedding for as many tokens.

    Raises :class:`UserError` where the base is not the one that the adapter was trained on.
    """
    try:
        return _adapted_model(Path(folder), vocabulary, dtype)
    except UserError:
        raise
    except Exception as error:  # of peft, safetensors, json, transformers: a folder can be broken in many ways
        raise UserError(f"{folder}: its adapter could not be loaded: {first_line(error)}") from None


def _adapted_model(folder: Path, vocabulary: int, dtype: Any) -> Any:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    require(bool(base), f"{folder} does not say whose adapter it is (base_model_name_or_path).")
    refuse_pickles(str(base))
    known = json.loads((folder / _ORIGIN).read_text()) if (folder / _ORIGIN).exists() else {}
    if "sha256" in known and origin_of(str(base)) != known:
        raise UserError(f"{folder} is an adapter of other weights than {base} holds now; put those back.")
    options = {**WEIGHTS_ONLY, "dtype": dtype, "revision": known.get("commit") or "main"}
    model: Any = AutoModelForCausalLM.from_pretrained(base, **options)
    if vocabulary > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocabulary)
    return PeftModel.from_pretrained(model, str(folder))
