"""The router's balancing loss of a mixture of experts, over the global batch (Fedus et al. 2021, arXiv:2101.03961).

It is E * sum_e f_e P_e of E experts, eq. 4 to 6 there: ``f_e`` is how often expert e is chosen at a position, ``P_e``
the mean probability that the router gives it, both over the positions of all layers and of the whole batch. ``f`` has
no gradient. Once it is known, the loss is a sum over positions, and its gradient adds up over micro-batches and ranks
like that of the nll. So ``f`` is counted first, in a pass without gradients. As transformers has it, probabilities are
a softmax of the router's logits, and the experts chosen are the likeliest.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.contract import IGNORED


def counted_positions(targets: Tensor) -> Tensor:
    """Return which positions count, bool [B * T]: up to the last trained target [B, T] of each row.

    What comes after it is padding, or is never read.
    """
    trained = (targets != IGNORED).flip(1).cumsum(1) > 0
    return trained.flip(1).flatten()


def count(router_logits: Iterable[Tensor], counted: Tensor, chosen: int) -> Tensor:
    """Return what :func:`loads` needs, [2 E + 1]: choices of each expert, its probabilities, and positions.

    ``router_logits`` are [B * T, E] of each layer, ``counted`` is of :func:`counted_positions`, ``chosen`` the number
    of experts a position.
    """
    sums: list[Tensor] = []
    for logits in router_logits:
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        choices = torch.zeros_like(probabilities).scatter_(
            1, probabilities.topk(chosen, -1).indices, 1.0
        )
        here = torch.cat([choices, probabilities, torch.ones_like(probabilities[:, :1])], 1)
        wide = torch.float32 if here.device.type == "mps" else torch.float64  # which that has not
        sums.append((here.to(wide) * counted[:, None]).sum(0))
    return torch.stack(sums).sum(0)


def loads(counts: Tensor, tokens: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return by what each probability is multiplied, float32 [E], and the balancing loss of the batch, a scalar.

    ``counts`` are the sums of :func:`count` over the batch. The first are such that what :func:`balancing` returns,
    divided by ``tokens``, adds up to ``weight`` times the loss.
    """
    experts, positions = len(counts) // 2, counts[-1].clamp(min=1)
    share, probability = counts[:experts] / positions, counts[experts:-1] / positions
    return (weight * experts * tokens * share / positions).float(), experts * (
        share * probability
    ).sum()


def balancing(router_logits: Iterable[Tensor], counted: Tensor, load: Tensor) -> Tensor:
    """Return this micro-batch's part of the balancing loss, times the tokens of the batch."""
    wide = [logits.to(torch.promote_types(logits.dtype, load.dtype)) for logits in router_logits]
    # no product of matrices, for which autocast would round the loads, whose differences are what counts
    return torch.stack(
        [(logits.softmax(-1) * load.to(logits.dtype)).sum(-1) * counted for logits in wide]
    ).sum()


@contextlib.contextmanager
def router_logits_of(base: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Yield a list that has the routers' logits, [B * T, E] of each layer, once ``base`` was called in the block.

    It stays empty where they are not ``wanted``. The model around it is not asked for them: it would compute a
    balancing loss of its own.
    """
    found: list[Tensor] = []

    def ask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        found.extend(getattr(output, "router_logits", None) or ())

    with contextlib.ExitStack() as hooks:
        if wanted:
            hooks.enter_context(base.register_forward_pre_hook(ask, with_kwargs=True))
            hooks.enter_context(base.register_forward_hook(keep))
        yield found
