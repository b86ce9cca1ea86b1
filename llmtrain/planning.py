"""Whether a recipe is only planned: ``llmtrain plan`` runs its ``main`` until the model is built.

``main`` runs as always up to :func:`llmtrain.place`, which :func:`llmtrain.fit` calls. There the
model is built without memory for its weights, and ``main`` ends. Code that does something else in a
plan than in a run asks :func:`current_plan`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class RecipePlan(NamedTuple):
    """How a recipe is planned.

    Attributes:
        precision: mixed precision of ``auto``, ``no`` or ``bf16``.
    """

    precision: str


_plan: ContextVar[RecipePlan | None] = ContextVar("plan", default=None)


def current_plan() -> RecipePlan | None:
    """Return how the recipe is planned; ``None`` if it runs."""
    return _plan.get()


@contextlib.contextmanager
def planning(precision: str) -> Iterator[None]:
    """Plan whatever recipe the block runs.

    Args:
        precision: mixed precision of ``auto``, ``no`` or ``bf16``.
    """
    token = _plan.set(RecipePlan(precision))
    try:
        yield
    finally:
        _plan.reset(token)
