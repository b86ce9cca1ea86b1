"""AdamW, Muon beside it, and the learning rate as a pure function of the step."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.parallel.mesh import TrainingAccelerator
from llmtrain.parallel.ranks import Ranks
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
    """Return the optimizer that ``--optim`` names, over the parameters that are trained.

    AdamW (Loshchilov & Hutter 2019) applies weight decay to matrices and not to vectors. With
    ``--optim muon``, Muon takes the hidden matrices, and AdamW the rest. Muon computes in bfloat16
    if that is the accelerator's mixed precision.

    Parameters on the meta device belong to other ranks, which have optimizers of their own.
    """
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta]

    for_muon: list[nn.Parameter] = []
    if config.optim == "muon":
        for_muon = [p for p in hidden_matrices(model) if not p.is_meta]

    muon_ids = {id(p) for p in for_muon}
    for_adamw = [p for p in trained if id(p) not in muon_ids]
    matrices = [p for p in for_adamw if p.dim() >= 2]
    vectors = [p for p in for_adamw if p.dim() < 2]

    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=True,
    )
    if not for_muon:
        return adamw

    muon = Muon(
        for_muon,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.adam_beta1,
        dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        ranks=Ranks(accelerator) if _may_share(accelerator) else None,
    )
    return MuonBesideAdamW(muon, adamw)


def _may_share(accelerator: Accelerator) -> bool:
    """Return whether ranks may share Muon's work: each computes the steps of some matrices.

    Which matrices a rank takes depends on the layout, so ``--bitwise`` forbids it. If ranks share a
    model, they hold different parameters.
    """
    if not isinstance(accelerator, TrainingAccelerator) or accelerator.bitwise:
        return False
    return accelerator.sharding.model_parallel_size == 1


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices between the embedding and the head.

    The head is the one that predicts tokens, or the ``score`` head of a reward model.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends: list[nn.Module] = [*embeddings, *_heads(model)]
    end_ids = {id(p) for module in ends for p in module.parameters()}

    # peft keeps the rows it trains of an embedding in a module of its own, `trainable_tokens`.
    return [
        p
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.dim() == 2
        and id(p) not in end_ids
        and "trainable_tokens" not in name
    ]


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the output heads of a model, apart from a head that is the embedding itself."""
    heads = [getattr(model, "score", None)]  # transformers' name for a sequence-classification head
    output_embeddings = getattr(model, "get_output_embeddings", None)
    if output_embeddings is not None:
        heads.append(output_embeddings())  # None for sequence classification
    return [head for head in heads if isinstance(head, nn.Module)]


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
