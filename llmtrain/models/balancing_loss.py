"""The balancing loss of a mixture of experts, over the global batch.

The loss is E * sum_e f_e P_e for E experts (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).
``f_e`` is the share of positions at which expert e is chosen, and ``P_e`` is the mean probability
that the router gives it. Both are taken over the positions of all layers and of the global batch.

``f`` has no gradient. Once it is known, the loss is a sum over positions, and its gradient adds up
over micro-batches and ranks like that of the nll. So a pass without gradients counts ``f`` first.

As in transformers, probabilities are a softmax of the router's logits, and the likeliest experts
are chosen.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.interfaces.batches import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def routed_positions(targets: Tensor) -> Tensor:
    """Return the positions that count for the balancing loss, as a mask bool [B * T].

    They are those up to the last target token of each row. Later ones are padding, or no target
    depends on them.

    Args:
        targets: [B, T], already shifted.
    """
    is_needed = (targets != IGNORED).flip(1).cumsum(1) > 0
    return is_needed.flip(1).flatten()


def count_choices(
    router_logits: Iterable[Tensor], is_routed: Tensor, experts_per_token: int
) -> Tensor:
    """Count the choices of the routers in a micro-batch.

    Args:
        router_logits: [B * T, E] of each layer.
        is_routed: the mask of :func:`routed_positions`.
        experts_per_token: how many experts are chosen at a position.

    Returns:
        float64 [2 E + 1], summed over layers: how often each expert is chosen, the sum of its
        probabilities, and the number of positions. It adds up over micro-batches.
    """
    layers: list[Tensor] = []
    for logits in router_logits:
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen_experts = probabilities.topk(experts_per_token, -1).indices
        choices = torch.zeros_like(probabilities).scatter_(1, chosen_experts, 1.0)
        counts = torch.cat([choices, probabilities, torch.ones_like(probabilities[:, :1])], 1)

        # MPS has no float64.
        wide = torch.float32 if counts.device.type == "mps" else torch.float64
        layers.append((counts.to(wide) * is_routed[:, None]).sum(0))
    return torch.stack(layers).sum(0)


def expert_weights(counts: Tensor, target_tokens: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return a factor for each expert's probability, and the balancing loss of the global batch.

    With these factors, the results of :func:`balancing_loss` for all micro-batches, divided by the
    target tokens, add up to ``weight`` times the balancing loss.

    Args:
        counts: the sums of :func:`count_choices` over the global batch.
        target_tokens: the number of target tokens of the global batch.
        weight: the weight of the balancing loss.

    Returns:
        The factors, float32 [E], and the balancing loss, a scalar.
    """
    experts = len(counts) // 2
    positions = counts[-1].clamp(min=1)
    choice_share = counts[:experts] / positions
    mean_probability = counts[experts:-1] / positions

    factors = (weight * experts * target_tokens * choice_share / positions).float()
    loss = experts * (choice_share * mean_probability).sum()
    return factors, loss


def balancing_loss(router_logits: Iterable[Tensor], is_routed: Tensor, factors: Tensor) -> Tensor:
    """Return a micro-batch's part of the balancing loss, times the target tokens of the step.

    Args:
        router_logits: [B * T, E] of each layer.
        is_routed: the mask of :func:`routed_positions`.
        factors: of :func:`expert_weights`.
    """
    layers = []
    for logits in router_logits:
        wide = logits.to(torch.promote_types(logits.dtype, factors.dtype))
        # Not a matrix product: autocast would round the factors, and only their differences matter.
        weighted = (wide.softmax(-1) * factors.to(wide.dtype)).sum(-1)
        layers.append(weighted * is_routed)
    return torch.stack(layers).sum()


@contextlib.contextmanager
def router_logits_of(base: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the routers' logits while ``base`` is called in the block.

    ``base`` returns router logits on request. The full model would do so, too, but it would also
    compute its own balancing loss.

    Yields:
        A list. It gets the logits [B * T, E] of each layer.
    """
    router_logits: list[Tensor] = []

    def request_router_logits(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def collect_router_logits(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        router_logits.extend(getattr(output, "router_logits", None) or ())

    with (
        base.register_forward_pre_hook(request_router_logits, with_kwargs=True),
        base.register_forward_hook(collect_router_logits),
    ):
        yield router_logits


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
