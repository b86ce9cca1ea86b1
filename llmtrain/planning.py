"""Whether a recipe is only planned: ``llmtrain plan`` runs its ``main`` until the model is built.

``main`` runs as always up to :func:`llmtrain.place`, which :func:`llmtrain.fit` calls. There the
model is built without memory for its weights, and ``main`` ends. Code that does something else in a
plan than in a run asks :func:`current_plan`.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple


class RecipePlan(NamedTuple):
    """How a recipe is planned.

    Attributes:
        precision: mixed precision of ``auto``, ``no`` or ``bf16``.
        folder: a temporary folder for files that a run would write.
    """

    precision: str
    folder: Path


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
    with tempfile.TemporaryDirectory() as folder:
        token = _plan.set(RecipePlan(precision, Path(folder)))
        try:
            yield
        finally:
            _plan.reset(token)
