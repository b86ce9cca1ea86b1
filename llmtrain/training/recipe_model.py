"""The model that a recipe trains, built by the recipe itself on the meta device."""

import contextlib
import io
import runpy
import tempfile
from typing import NamedTuple

import torch
from torch import nn

from llmtrain.config.command_line import parse
from llmtrain.config.flags import configs_of, value_of
from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.interfaces.objective import Objective
from llmtrain.json_types import JsonObject
from llmtrain.models.causal_lm import CausalLM, head_of
from llmtrain.models.trainable import make_trainable
from llmtrain.observe.throughput import CountsFlops
from llmtrain.training.settings import Settings
from llmtrain.training.steps import settle

_REQUIRED_NAMES = ("DEFAULTS", "tokenized", "build")


class RecipeModel(NamedTuple):
    """A model to plan for, and how it is trained.

    Attributes:
        model: the model, on the meta device.
        settings: the settings of the run.
        precision: mixed precision, ``no`` or ``bf16``.
        positions: the positions of a row that a micro-batch computes.
        objective: the loss that is minimised.
    """

    model: nn.Module
    settings: Settings
    precision: str
    positions: int
    objective: Objective = Objective()

    @property
    def class_name(self) -> str:
        """The name of the model's class, before this package has extended it."""
        return str(getattr(self.model, "own_class", type(self.model)).__name__)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward and a backward pass; 0 if they are unknown."""
        return self.model.flops_per_token() if isinstance(self.model, CountsFlops) else 0

    @property
    def has_gradient_checkpointing(self) -> bool:
        """Whether the backward pass computes activations again."""
        return bool(value_of(self.settings, "gradient_checkpointing", default=False))


def build_recipe_model(recipe: str, flags: list[str], precision: str) -> RecipeModel:
    """Return the model that a recipe would train with these flags.

    The recipe's data is tokenised first, because the vocabulary determines the size of the model.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        precision: mixed precision, ``no`` or ``bf16``.

    Raises:
        UserError: if the file is not a recipe, or its model cannot be built without weights.
    """
    names = _load_recipe(recipe)
    settings: Settings = parse(names["DEFAULTS"], flags)

    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        for config in configs_of(settings).values():
            config.prepare_for_plan(folder)  # a plan writes nothing into a run
        rows = names["tokenized"](settings)
        settle(settings, rows)
        try:
            with torch.device("meta"):
                bundle: ModelBundle | nn.Module = names["build"](settings, rows, precision)
        except (RuntimeError, NotImplementedError) as error:
            # On the meta device, reading the value of a tensor fails.
            raise UserError(
                f"{recipe}: build() needs values of weights, and a plan has none: "
                f"{first_line(error)}"
            ) from None

    if isinstance(bundle, ModelBundle):
        model = bundle.model
        objective = bundle.objective
    else:
        model = bundle
        objective = Objective()
    make_trainable(model)

    if isinstance(model, CausalLM):
        # A run tests this with values. Nearly all models have a linear head.
        model.head_is_linear = head_of(model) is not None
    return RecipeModel(
        model=model,
        settings=settings,
        precision=precision,
        positions=rows.positions,
        objective=objective,
    )


def _load_recipe(recipe: str) -> JsonObject:
    """Run a recipe's module, and return its global names."""
    try:
        names = runpy.run_path(recipe, run_name="llmtrain.recipe")
    except Exception as error:  # the recipe is the user's own program
        raise UserError(
            f"{recipe} could not be loaded: {type(error).__name__}: {first_line(error)}"
        ) from None

    missing = [name for name in _REQUIRED_NAMES if name not in names]
    if missing:
        raise UserError(
            f"{recipe} has no {' and no '.join(missing)}, so llmtrain plan cannot build its model; "
            "see recipes/gpt.py."
        )
    return names
