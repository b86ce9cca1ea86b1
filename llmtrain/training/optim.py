"""AdamW, Muon beside it, and the learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.config import Config, flag, require, require_at_least
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.mesh import sharding_of
from llmtrain.training.muon import Muon

_DECAY_SHARE = 0.2  # of a warmup-stable-decay run is its decay (Hägele et al. 2024, arXiv:2405.18392, section 3)


@dataclass
class OptimConfig(Config):
    """How long a run updates its weights, how fast, and by which rule. Each field is a flag of the recipe."""

    _argument_group_name: ClassVar[str] = "optimization"
    acts: ClassVar[str] = "update"

    optim: Literal["adamw", "muon"] = flag("adamw", "muon: for the matrices of hidden layers, with AdamW for the rest")
    max_steps: int = flag(400, "updates in the run")
    learning_rate: float = flag(1e-3, "peak learning rate")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = flag(
        "cosine", "the learning rate after the warm-up; all but constant end at zero"
    )
    warmup_steps: int = flag(50, "updates over which the learning rate rises from zero")
    weight_decay: float = flag(0.1, "decoupled weight decay of matrices; biases and norms have none")
    adam_beta1: float = flag(0.9, "decay of the mean of gradients, AdamW's and Muon's", hidden=True)
    adam_beta2: float = flag(0.95, "decay of AdamW's mean of squared gradients", hidden=True)
    max_grad_norm: float = flag(1.0, "the global gradient norm is clipped to this")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "max_steps")
        require_at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"--{name} {getattr(self, name)} must be at least 0 and below 1.")
        require(self.max_grad_norm > 0, f"--max_grad_norm {self.max_grad_norm} must be above 0.")


def lr_at(step: int, config: OptimConfig) -> float:
    """Return the learning rate of the update after ``step`` completed ones; all schedules but ``constant`` end at 0."""
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    left = max(config.max_steps - step, 0)  # updates still to come, this one included
    span = max(config.max_steps - config.warmup_steps, 1)
    match config.lr_scheduler_type:
        case "constant":
            return peak
        case "linear":
            return peak * left / span
        case "cosine":
            return peak * 0.5 * (1 - math.cos(math.pi * left / span))
        case "warmup_stable_decay":
            return peak * min(1.0, left / max(min(_DECAY_SHARE * config.max_steps, span), 1))


def make_optimizer(accelerator: Accelerator, model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019), which decays matrices and leaves vectors alone.

    With ``--optim muon``, Muon updates the matrices of hidden layers, in bfloat16 where that is the accelerator's
    precision.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
    hidden = [p for p in hidden_matrices(model) if not p.is_meta] if config.optim == "muon" else []
    rest = [p for p in parameters if not any(p is matrix for matrix in hidden)]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
    if not hidden:
        return adamw
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    muon = Muon(hidden, config.learning_rate, config.weight_decay, config.adam_beta1, dtype, _may_share(accelerator))
    return MuonBesideAdamW(muon, adamw)


def _may_share(accelerator: Accelerator) -> bool:
    """Return whether all ranks have the same gradients, and may compute updates in other groups on other layouts."""
    handler, sharding = accelerator.ddp_handler, sharding_of(accelerator)
    alone = not isinstance(handler, DDPHandler) or handler.bitwise or handler.config.sync_every > 1
    return not alone and (sharding is None or sharding.together == 1)


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Return the matrices between the embedding and the head."""
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_output_embeddings"):  # Hugging Face's models know their head; ours is its embedding
        outer.append(model.get_output_embeddings())
    known = {id(p) for module in outer for p in module.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2]
    return [p for name, p in named if id(p) not in known and "trainable_tokens" not in name]


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the rest, as one optimizer with one learning rate and one weight decay."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts work on this optimizer's groups and state."""
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:  # how load_state_dict replaces groups and state
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
