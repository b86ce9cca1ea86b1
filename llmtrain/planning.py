"""Whether a recipe is only planned: ``llmtrain plan`` runs its ``main`` until the model is built.

``main`` runs as always up to :func:`llmtrain.place`, which :func:`llmtrain.fit` calls. There the
model is built without memory for its weights, and ``main`` ends. ``llmtrain tokenize`` ends it
earlier, in :func:`llmtrain.tokenize`. Code that does something else in a plan than in a run asks
:func:`current_plan`.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple


class RecipePlan(NamedTuple):
    """How a recipe is planned.

    Attributes:
        precision: mixed precision of ``auto``, ``no`` or ``bf16``.
        folder: a temporary folder for files that a run would write.
        take_rows: takes the :class:`llmtrain.data.request.DataRequest` of the recipe. Then ``main``
            ends.
    """

    precision: str
    folder: Path
    take_rows: Callable[[Any], None] | None = None


class RowsAreMade(BaseException):
    """Ends ``main`` of a recipe whose rows were taken. No ``except Exception`` catches it."""


_plan: ContextVar[RecipePlan | None] = ContextVar("plan", default=None)


def current_plan() -> RecipePlan | None:
    """Return how the recipe is planned; ``None`` if it runs."""
    return _plan.get()


@contextlib.contextmanager
def planning(precision: str, take_rows: Callable[[Any], None] | None = None) -> Iterator[None]:
    """Plan whatever recipe the block runs; see :class:`RecipePlan` for the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        token = _plan.set(RecipePlan(precision, Path(folder), take_rows))
        try:
            yield
        finally:
            _plan.reset(token)
