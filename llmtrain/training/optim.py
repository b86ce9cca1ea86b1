"""The optimizers AdamW and Muon."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.sharding import TrainingAccelerator
from llmtrain.training.muon import Muon
from llmtrain.training.settings import OptimConfig


def make_optimizer(
    accelerator: Accelerator, model: nn.Module, config: OptimConfig
) -> torch.optim.Optimizer:
    """Make the optimizer that ``--optim`` names, over the parameters that are trained.

    AdamW (Loshchilov & Hutter 2019) applies weight decay to matrices and not to vectors. With
    ``--optim muon``, Muon takes the hidden matrices, and AdamW the rest. Muon computes in bfloat16
    if that is the accelerator's mixed precision.
    """
    trained = [p for p in model.parameters() if p.requires_grad]

    for_muon: list[nn.Parameter] = []
    if config.optim == "muon":
        for_muon = hidden_matrices(model)

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
        eps=config.adam_epsilon,
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
        ranks=Ranks(accelerator) if _may_share_work(accelerator) else None,
    )
    return MuonWithAdamW(muon, adamw)


def optimizer_class(name: str, model: nn.Module) -> type[torch.optim.Optimizer]:
    """Return the class that :func:`make_optimizer` uses if ``--optim`` is ``name``.

    For a model without hidden matrices, such as one whose adapters are all in the embedding, Muon
    has nothing to do, and that is AdamW.
    """
    if name == "muon" and hidden_matrices(model):
        return MuonWithAdamW
    return torch.optim.AdamW


def _may_share_work(accelerator: Accelerator) -> bool:
    """Return whether ranks may divide Muon's matrices among them.

    They may not with ``--bitwise``, because the division depends on the layout.
    """
    return isinstance(accelerator, TrainingAccelerator) and not accelerator.bitwise


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices between the embedding and the head.

    The head predicts tokens, or is the ``score`` head of a reward model.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded_ids: set[int] = set()
    for module in [*embeddings, *_heads(model)]:
        excluded_ids.update(id(p) for p in module.parameters())

    matrices = []
    for name, p in model.named_parameters():
        # peft keeps the trained rows of an embedding in a separate module, `trainable_tokens`.
        is_embedding = id(p) in excluded_ids or "trainable_tokens" in name
        if p.requires_grad and p.dim() == 2 and not is_embedding:
            matrices.append(p)
    return matrices


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the output heads of a model."""
    heads = [getattr(model, "score", None)]  # transformers' name for a sequence-classification head
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    if get_output_embeddings is not None:
        heads.append(get_output_embeddings())  # None for sequence classification
    return [head for head in heads if isinstance(head, nn.Module)]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the rest, as a single optimizer.

    Its parameter groups are Muon's, then AdamW's. Each keeps the settings that it has.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        """Let both parts work on this optimizer's groups and state."""
        muon, adamw = self.parts
        muon_count = len(muon.param_groups)
        muon.param_groups = self.param_groups[:muon_count]
        adamw.param_groups = self.param_groups[muon_count:]
        muon.state = self.state
        adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace groups and state; ``load_state_dict`` calls this."""
        super().__setstate__(state)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
