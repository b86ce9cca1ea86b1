"""The objective of a mixture of experts: the nll of next tokens, plus a balancing loss.

The balancing loss is E * sum_e f_e P_e for E experts (Fedus et al. 2021, arXiv:2101.03961,
equations 4 to 6). ``f_e`` is the share of positions at which expert e is chosen, and ``P_e`` is the
mean probability that the router gives it. Both are taken over the positions of all layers and of
the global batch.

``f`` has no gradient. Once it is known, the loss is a sum over positions, and its gradient adds up
over micro-batches and ranks like that of the nll. So a pass without gradients counts ``f`` first.

As in transformers, probabilities are a softmax of the router's logits, and the likeliest experts
are chosen.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.console import say
from llmtrain.device_numbers import widest_dtype
from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.loss import targets_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def is_mixture_of_experts(config: "PreTrainedConfig") -> bool:
    """Return whether the configuration is of a model with several experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def balance_weight(config: "PreTrainedConfig") -> float:
    """Return the weight of the balancing loss in a configuration. It is 0 if there is none."""
    text_config = config.get_text_config()
    if not is_mixture_of_experts(text_config):
        return 0.0
    return float(getattr(text_config, "router_aux_loss_coef", None) or 0)


class ExpertObjective(Objective):
    """The mean nll per target token, plus the balancing loss over the global batch.

    The balancing loss changes the gradient, but not the value that is logged as the loss.

    Args:
        weight: the weight of the balancing loss. If it is 0, there is no counting pass.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        if "expert_weights" not in extra:
            return super().loss(model, batch, extra)

        with _router_logits_of(model.base_model) as router_logits:
            nll = model.nll(**batch)
        is_routed = routed_positions(batch["labels"])
        balancing = balancing_loss(router_logits, is_routed, extra["expert_weights"])
        # The value is zero, and the gradient is that of the balancing loss.
        gradient_only = balancing - balancing.detach()
        return LossSums(nll + gradient_only)

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Count how often each expert is chosen in the global batch.

        Returns:
            The factors ``expert_weights`` of :func:`balancing_loss`, float32 [E], with which its
            results for all micro-batches, divided by the target tokens, add up to ``weight`` times
            the balancing loss. And that loss, a scalar.
        """
        if not self.weight:
            return {}
        counts = engine.sum_over_batches(count_choices, batches)
        experts = len(counts) // 2
        positions = counts[-1].clamp(min=1)
        choice_share = counts[:experts] / positions
        mean_probability = counts[experts:-1] / positions

        factors = self.weight * experts * totals.target_tokens * choice_share / positions
        loss = experts * (choice_share * mean_probability).sum()
        return {"expert_weights": factors.float(), "balance_loss": loss}

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        if "balance_loss" not in extra:
            return {}
        return {"balance_loss": float(extra["balance_loss"])}

    def check(self, model: Any) -> None:
        """Turn the balancing loss off if the model's own class has none."""
        if not self.weight:
            return
        if not hasattr(sys.modules[model.own_class.__module__], "load_balancing_loss_func"):
            self.weight = 0.0
            say("experts", "this model class has no balancing loss")
            return
        say("experts", f"the balancing loss, times {self.weight:g}, takes a further forward pass")


def routed_positions(labels: Tensor) -> Tensor:
    """Return the positions that count for the balancing loss, as a mask bool [B * (T - 1)].

    They are those up to the last target token of each row. Later ones are padding, or no target
    depends on them.

    Args:
        labels: [B, T], not shifted.
    """
    is_needed = (targets_of(labels) != IGNORED).flip(1).cumsum(1) > 0
    return is_needed.flip(1).flatten()


def count_choices(model: Any, batch: Batch) -> Tensor:
    """Run the layers on a micro-batch, and count the choices of the routers.

    Returns:
        float64 [2 E + 1], summed over layers: how often each expert is chosen, the sum of its
        probabilities, and the number of positions. It adds up over micro-batches.
    """
    with _router_logits_of(model.base_model) as router_logits:
        model.hidden(**batch)
    is_routed = routed_positions(batch["labels"])
    experts_per_token = int(model.config.get_text_config().num_experts_per_tok)

    layers: list[Tensor] = []
    for logits in router_logits:
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen_experts = probabilities.topk(experts_per_token, -1).indices
        choices = torch.zeros_like(probabilities).scatter_(1, chosen_experts, 1.0)
        counts = torch.cat([choices, probabilities, torch.ones_like(probabilities[:, :1])], 1)
        counts = counts.to(widest_dtype(counts.device))
        layers.append((counts * is_routed[:, None]).sum(0))
    return torch.stack(layers).sum(0)


def balancing_loss(router_logits: Iterable[Tensor], is_routed: Tensor, factors: Tensor) -> Tensor:
    """Return a micro-batch's part of the balancing loss, times the target tokens of the step.

    Args:
        router_logits: [B * T, E] of each layer.
        is_routed: the mask of :func:`routed_positions`.
        factors: of :meth:`ExpertObjective.prepass`.
    """
    layers = []
    for logits in router_logits:
        wide = logits.to(torch.promote_types(logits.dtype, factors.dtype))
        # Not a matrix product: autocast would round the factors, and only their differences matter.
        weighted = (wide.softmax(-1) * factors.to(wide.dtype)).sum(-1)
        layers.append(weighted * is_routed)
    return torch.stack(layers).sum()


@contextlib.contextmanager
def _router_logits_of(base: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the routers' logits while ``base`` is called in the block: [B * T, E] of each layer.

    ``base`` returns router logits on request. The full model would do so, too, but it would also
    compute its own balancing loss.
    """
    router_logits: list[Tensor] = []

    def request_router_logits(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def collect_router_logits(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        router_logits.extend(output.router_logits)

    with (
        base.register_forward_pre_hook(request_router_logits, with_kwargs=True),
        base.register_forward_hook(collect_router_logits),
    ):
        yield router_logits
