"""The model that a recipe trains. For a plan, the recipe itself builds it on the meta device."""

import contextlib
import inspect
import io
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import numpy as np
from torch import nn

from llmtrain.config.flags import value_of
from llmtrain.console import say
from llmtrain.data.packing import LENGTHS, PREFERENCE_COLUMNS
from llmtrain.data.request import DataRequest
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError, explain, first_line
from llmtrain.interfaces.model import ModelBundle
from llmtrain.interfaces.objective import Objective
from llmtrain.launching.accelerator import forget_accelerator
from llmtrain.models.distillation_objective import SAMPLED_COLUMNS, DistillationObjective
from llmtrain.observe.throughput import CountsFlops
from llmtrain.planning import planning
from llmtrain.training.settings import Settings


class RecipeModel(NamedTuple):
    """A model, and how it is trained.

    Attributes:
        model: the model, on the meta device or not.
        settings: the settings of the run.
        precision: mixed precision, ``no`` or ``bf16``.
        rows: the rows to train on.
        objective: the loss that is minimised.
        frozen: further models by name, which the objective may run.
    """

    model: nn.Module
    settings: Settings
    precision: str
    rows: Tokenized
    objective: Objective = Objective()
    frozen: Mapping[str, nn.Module] = MappingProxyType({})

    @classmethod
    def of(
        cls, bundle: ModelBundle, settings: Settings, precision: str, rows: Tokenized
    ) -> "RecipeModel":
        """Return the model of a bundle, and how it is trained."""
        return cls(
            model=bundle.model,
            settings=settings,
            precision=precision,
            rows=rows,
            objective=bundle.objective,
            frozen={name: frozen.model for name, frozen in bundle.frozen.items()},
        )

    @property
    def class_name(self) -> str:
        """The name of the model's class, before this package has extended it."""
        return str(getattr(self.model, "own_class", type(self.model)).__name__)

    @property
    def extra_columns(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The columns of the rows besides tokens and labels: name, dtype and shape of each."""
        columns = []
        for name, column in self.rows.train.columns.items():
            if name not in (*PREFERENCE_COLUMNS, LENGTHS):
                dtype = "int64" if np.dtype(column.dtype).kind in "iu" else column.dtype
                columns.append((name, dtype, (*column.shape,)))
        if isinstance(self.objective, DistillationObjective) and self.objective.source == "samples":
            shape = (self.rows.positions + 1,)
            columns += [(name, "float32", shape) for name in SAMPLED_COLUMNS]
        return tuple(columns)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward and a backward pass; 0 if they are unknown."""
        return self.model.flops_per_token() if isinstance(self.model, CountsFlops) else 0

    @property
    def recomputes(self) -> bool:
        """Whether the flags let all blocks recompute their activations."""
        return bool(value_of(self.settings, "gradient_checkpointing", default=False))


class PlannedModel(BaseException):
    """Ends ``main`` of a recipe that is planned: its model is built, on the meta device.

    Code of a recipe that catches every :class:`Exception` does not catch it.
    """

    def __init__(self, recipe: RecipeModel) -> None:
        super().__init__()
        self.recipe = recipe


def build_recipe_model(
    recipe: str,
    flags: list[str],
    precision: str,
    take_rows: Callable[[DataRequest], None] | None = None,
) -> RecipeModel:
    """Return the model that a recipe would train with these flags.

    The recipe's own ``main`` runs until the model is built. Its data is tokenised before that,
    because the vocabulary determines the size of the model. What it prints is left out, unless it
    ends like ``--help``.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        precision: mixed precision unless the flags set it, ``no`` or ``bf16``.
        take_rows: takes the rows that the recipe asks for, instead of tokenising them.

    Raises:
        RowsAreMade: if they were taken.
        UserError: if the file is not a recipe, or its model cannot be built without weights.
    """
    if take_rows is None:
        say("recipe", f"{recipe}: building its model without weights", sys.stderr)
    printed = io.StringIO()
    # The recipe finds its flags and the modules of its folder, as when Python runs it.
    folder = str(Path(recipe).resolve().parent)
    try:
        with (
            planning(precision, take_rows),
            mock.patch.object(sys, "argv", [recipe, *flags]),
            mock.patch.object(sys, "path", [folder, *sys.path]),
            contextlib.redirect_stdout(printed),
        ):
            main = runpy.run_path(recipe, run_name="llmtrain.recipe").get("main")
            if not callable(main):
                raise UserError(
                    f"{recipe} has no function main, which this command calls; see recipes/gpt.py."
                )
            if inspect.signature(main).parameters:
                main(flags)
            else:
                main()
    except PlannedModel as planned:
        return planned.recipe
    except SystemExit:
        print(printed.getvalue(), end="")
        raise
    except Exception as error:  # the recipe is the user's own program
        if explain(error) is not None:
            raise
        raise UserError(
            f"{recipe} failed before its model was built: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    finally:
        forget_accelerator()

    raise UserError(
        f"{recipe}: main() builds no model with llmtrain.fit or llmtrain.place, so there is "
        "nothing to plan or to print; see recipes/gpt.py."
    )
