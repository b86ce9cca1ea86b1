"""AdamW, Muon beside it, and the learning rate as a pure function of the step."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.mesh import sharding_of
from llmtrain.training.muon import Muon
from llmtrain.training.settings import OptimConfig

_DECAY_SHARE = 0.2  # of a warmup-stable-decay run is its decay (Hägele et al. 2024, arXiv:2405.18392, section 3)


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


def make_optimizer(
    accelerator: Accelerator, model: nn.Module, config: OptimConfig
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019), which decays matrices and leaves vectors alone.

    With ``--optim muon``, Muon updates the matrices of hidden layers, in bfloat16 where that is the accelerator's
    precision.
    """
    hidden = [p for p in hidden_matrices(model) if not p.is_meta] if config.optim == "muon" else []
    taken = {id(p) for p in hidden}
    rest = [
        p for p in model.parameters() if p.requires_grad and not p.is_meta and id(p) not in taken
    ]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), fused=True
    )
    if not hidden:
        return adamw
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    muon = Muon(
        hidden,
        config.learning_rate,
        config.weight_decay,
        config.adam_beta1,
        dtype,
        _may_share(accelerator),
    )
    return MuonBesideAdamW(muon, adamw)


def _may_share(accelerator: Accelerator) -> bool:
    """Return whether ranks may share Muon's work: each computes the steps of some matrices.

    Which matrices a rank takes depends on the layout, so ``--bitwise`` forbids it. With tensor
    parallelism or pipeline stages the ranks hold different parameters.
    """
    handler = accelerator.ddp_handler
    if not isinstance(handler, DDPHandler) or handler.bitwise:
        return False
    return sharding_of(accelerator).together == 1


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Return the matrices between the embedding and the head."""
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_output_embeddings"):  # of our GPT-2 the embedding is the head
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

    def __setstate__(
        self, state: dict[str, Any]
    ) -> None:  # how load_state_dict replaces groups and state
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
