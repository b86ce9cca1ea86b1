"""The settings of models: those of this package's GPT and of Hugging Face's, of LoRA, and of preferences."""

import contextlib
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmtrain.config import Config, flag, require_at_least
from llmtrain.errors import UserError, require


@dataclass
class GPTConfig(Config):
    """The size of a GPT. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "model"
    acts: ClassVar[str] = "model"

    n_layer: int = flag(4, "transformer blocks")
    n_head: int = flag(4, "attention heads in a block; must divide n_embd")
    n_embd: int = flag(256, "width of the residual stream")
    block_size: int = flag(128, "tokens that the model can look at", acts="model data")
    dropout: float = flag(
        0.0, "share of activations dropped after the embedding and in each branch", acts="pass"
    )
    gradient_checkpointing: bool = flag(
        False, "keep no activations: compute them again in backward", acts="layout"
    )
    architecture: Literal["gpt2", "lfm2"] = flag(
        "gpt2",
        "the class of transformers that loads it: gpt2, to learn from, or lfm2, which learns faster",
    )

    def __post_init__(self) -> None:
        require_at_least(self, 1, "n_layer", "n_head", "n_embd", "block_size")
        require(0 <= self.dropout < 1, f"--dropout {self.dropout} must be at least 0 and below 1.")
        if self.n_embd % self.n_head:
            fits = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:3])
            raise UserError(
                f"--n_head {self.n_head} does not divide --n_embd {self.n_embd}; n_head {', '.join(map(str, near))} "
                f"would, or n_embd {-(-self.n_embd // self.n_head) * self.n_head}."
            )


@dataclass
class ModelConfig(Config):
    """The model of Hugging Face's that is trained, and the weights that it starts from. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "model"
    acts: ClassVar[str] = "model"

    model_name_or_path: str | None = flag(
        None, "the folder or hub name of a causal LM to start from"
    )
    from_config: str | None = flag(
        None,
        "random weights: a model type such as llama, qwen3 or gpt2 (a small one), or a folder or hub name whose "
        "configuration is taken",
    )
    config_overrides: str | None = flag(
        None, 'of --from_config: "hidden_size=256,num_hidden_layers=8"'
    )
    block_size: int = flag(512, "tokens of a row", acts="model data")
    attn_implementation: str | None = flag(
        None, "sdpa, eager, flash_attention_2, ... (default: the model's)", acts="pass"
    )
    gradient_checkpointing: bool = flag(
        False, "keep no activations: compute them again in backward", acts="layout"
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "weight of the routers' balancing loss in a mixture of experts (default: the model's); 0: none",
    )
    freeze: str | None = flag(
        None, "a regular expression: parameters with a matching name are not trained"
    )
    load_in_4bit: bool = flag(
        False, "hold the frozen weights of a LoRA run in 4 bits (bitsandbytes, on a GPU)"
    )
    trust_remote_code: bool = flag(False, "run code that comes with a model or a tokenizer")

    def __post_init__(self) -> None:
        require_at_least(self, 2, "block_size")
        require((self.router_aux_loss_coef or 0) >= 0, "--router_aux_loss_coef must be at least 0.")
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UserError(
                f"--freeze '{self.freeze}' is no regular expression: {error}."
            ) from None
        overrides = self.config_overrides and self.model_name_or_path
        require(
            not overrides,
            "--config_overrides is for --from_config: the weights of a model fit its own sizes.",
        )

    def fit_block_size(self) -> None:
        """Lower a block size that nobody has set to the positions of the model to load, and say so."""
        from transformers import AutoConfig

        name, positions = self.model_name_or_path, None
        if name is None or self.given("block_size"):
            return
        with contextlib.suppress(
            Exception
        ):  # what is wrong with the model is said where it is loaded
            found = AutoConfig.from_pretrained(name, trust_remote_code=self.trust_remote_code)
            positions = getattr(found.get_text_config(), "max_position_embeddings", None)
        if positions and positions < self.block_size:
            self.default("block_size", positions, "what this model has positions for")


@dataclass
class LoraConfig(Config):
    """The adapter that is trained in place of a model (Hu et al. 2021, arXiv:2106.09685). Each field is a flag."""

    _argument_group_name: ClassVar[str] = "LoRA"
    acts: ClassVar[str] = "model"

    lora_r: int = flag(0, "rank of the trained matrices; 0 trains the model itself")
    lora_alpha: int = flag(32, "their product is scaled by alpha / r")
    lora_target_modules: list[str] = flag(
        ["all-linear"], "modules beside which they stand, by the end of their names"
    )
    lora_dropout: float = flag(0.0, "share of their inputs dropped", acts="pass")
    use_dora: bool = flag(
        False, "train magnitudes apart from directions (Liu et al. 2024, arXiv:2402.09353)"
    )

    def __post_init__(self) -> None:
        require_at_least(self, 0, "lora_r")
        idle = not self.lora_r and (self.lora_dropout or self.use_dora)
        require(not idle, "--lora_dropout and --use_dora need --lora_r.")
        whole = "all-linear" not in self.lora_target_modules or len(self.lora_target_modules) == 1
        require(
            whole, "--lora_target_modules: all-linear is all of them; name no others beside it."
        )
        require(self.lora_alpha > 0, f"--lora_alpha {self.lora_alpha} must be above 0.")
        require(
            0 <= self.lora_dropout < 1,
            f"--lora_dropout {self.lora_dropout} must be at least 0 and below 1.",
        )


@dataclass
class PreferenceConfig(Config):
    """How answers are compared. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "preferences"
    acts: ClassVar[str] = "pass"

    loss_type: Literal["sigmoid", "ipo", "robust", "kto", "orpo", "simpo", "reward"] = flag(
        "sigmoid", "sigmoid is DPO's; reward trains a model that gives an answer a score"
    )
    beta: float = flag(
        0.1,
        "how far the model may move from its first weights; of orpo and simpo the weight or scale",
    )
    label_smoothing: float = flag(
        0.0, "share of pairs that are the wrong way round, for sigmoid, robust and simpo"
    )
    desirable_weight: float = flag(1.0, "weight of desirable answers, for kto")
    undesirable_weight: float = flag(1.0, "weight of undesirable answers, for kto")
    simpo_gamma: float = flag(
        0.5, "margin that simpo wants between two answers, in units of beta times nats a token"
    )

    def __post_init__(self) -> None:
        require(
            0 < self.beta < float("inf"), f"--beta {self.beta} is out of range: it must be above 0."
        )
        require(
            0 <= self.label_smoothing < 0.5,
            f"--label_smoothing {self.label_smoothing}: at least 0, below 0.5.",
        )
        smoothed = self.loss_type in ("sigmoid", "robust", "simpo")
        require(
            smoothed or not self.label_smoothing,
            f"--label_smoothing: --loss_type {self.loss_type} has none.",
        )
        for name in ("desirable_weight", "undesirable_weight"):
            weight = getattr(self, name)
            require(
                0 < weight < float("inf"), f"--{name} {weight} is out of range: it must be above 0."
            )
            require(weight == 1 or self.loss_type == "kto", f"--{name} is for --loss_type kto.")
        require(
            self.simpo_gamma == 0.5 or self.loss_type == "simpo",
            "--simpo_gamma is for --loss_type simpo.",
        )

    @property
    def alone(self) -> bool:
        """True where an answer is judged alone, not beside another."""
        return self.loss_type == "kto"

    @property
    def takes_reference(self) -> bool:
        """True where the loss compares with the weights that a run starts from."""
        return self.loss_type not in ("orpo", "simpo", "reward")
