"""Settings of LoRA."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from llmtrain.config.flags import Affects, Config, flag, require_range
from llmtrain.errors import UserError

_ALPHA = 32
_TARGET_MODULES = ["all-linear"]


@dataclass
class LoraConfig(Config):
    """LoRA, an adapter that is trained instead of the model (Hu et al. 2021, arXiv:2106.09685).

    Each field is a flag.
    """

    group: ClassVar[str] = "LoRA"
    affects: ClassVar[Affects] = "numbers"

    lora_r: int = flag(
        0,
        "train a LoRA adapter of this rank instead of the model; 0: train the model itself",
    )
    lora_alpha: int = flag(
        _ALPHA,
        "scale of the adapter: its output is multiplied by alpha / r",
        hidden=True,
    )
    lora_target_modules: list[str] = flag(
        [*_TARGET_MODULES],
        "modules that get LoRA matrices, given by the end of their names, such as q_proj; "
        "all-linear: every linear layer except the output head",
        hidden=True,
    )
    lora_modules_to_save: list[str] = flag(
        [],
        "modules that are trained in full beside the matrices, given by the end of their names, "
        "such as embed_tokens lm_head",
        hidden=True,
    )
    lora_dropout: float = flag(
        0.0,
        "dropout probability on the inputs of the LoRA matrices",
        affects="numbers",
        hidden=True,
    )
    use_dora: bool = flag(
        False,
        "DoRA: train the magnitude of each weight vector separately from its direction (Liu et al. "
        "2024, arXiv:2402.09353)",
        hidden=True,
    )

    use_rslora: bool = flag(
        False,
        "scale the adapter by alpha / sqrt(r) instead of alpha / r, for high ranks (Kalajdzievski "
        "2023, arXiv:2312.03732)",
        hidden=True,
    )

    def __post_init__(self) -> None:
        require_range(self, "lora_r", "lora_dropout", at_least=0)
        if not self.lora_r:
            for name in ("lora_modules_to_save", "lora_dropout", "use_dora", "use_rslora"):
                if getattr(self, name):
                    raise UserError(f"--{name} needs --lora_r.")
            if self.lora_alpha != _ALPHA or self.lora_target_modules != _TARGET_MODULES:
                raise UserError("--lora_alpha and --lora_target_modules need --lora_r.")
        elif find_spec("peft") is None:  # said here, before the data are read
            raise UserError("--lora_r needs peft: pip install 'llmtrain[lora]'.")
        require_range(self, "lora_alpha", at_least=1)
        if self.lora_dropout >= 1:
            raise UserError(f"--lora_dropout {self.lora_dropout} is too large: it must be below 1.")
