"""The model that a recipe would train, made by the recipe's own ``build`` on the meta device, without memory."""

import contextlib
import io
import runpy
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from llmtrain.config import parse
from llmtrain.errors import UserError, first_line
from llmtrain.models.causal_lm import CausalLM, head_of
from llmtrain.models.trainable import make_trainable
from llmtrain.observe.throughput import CountsFlops
from llmtrain.parallel.stages import Staged
from llmtrain.plan.activations import list_of_blocks
from llmtrain.training.settings import AnySettings
from llmtrain.types import ModelBundle, Objective

_NEEDED = ("DEFAULTS", "tokenized", "build")


class Subject(NamedTuple):
    """A model to plan for, and how it would be trained."""

    model: nn.Module  # on the meta device
    settings: AnySettings
    precision: str  # "no" or "bf16"
    positions: int  # of a row, that a micro-batch computes
    objective: Objective = Objective()

    @property
    def kind(self) -> str:
        """The name of the model's class, as its author calls it."""
        return str(getattr(self.model, "own_class", type(self.model)).__name__)

    @property
    def width(self) -> int:
        """Size of the hidden states. Raises :class:`UserError` where the model does not say it."""
        if isinstance(self.model, Staged):
            return self.model.width
        if isinstance(self.model, PreTrainedModel):
            return int(self.model.config.get_text_config().hidden_size)
        raise UserError(f"{self.kind} does not say the width of its hidden states.")

    @property
    def blocks(self) -> int:
        if isinstance(self.model, PreTrainedModel):
            return int(self.model.config.get_text_config().num_hidden_layers)
        return len(list_of_blocks(self.model) or [self.model])

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward and a backward pass; 0 where nobody knows."""
        return self.model.flops_per_token() if isinstance(self.model, CountsFlops) else 0

    @property
    def recomputes(self) -> bool:
        """``--gradient_checkpointing``: activations are computed again in the backward pass."""
        return bool(getattr(self.settings.model, "gradient_checkpointing", False))


def subject_of(recipe: str, flags: list[str], precision: str) -> Subject:
    """Return the model that a recipe would train with these flags.

    The recipe's data is tokenized, because the size of the vocabulary is a size of the model.

    Raises:
        UserError: The file is not a recipe, or its model cannot be built without weights.
    """
    try:
        names = runpy.run_path(recipe, run_name="llmtrain.recipe")
    except Exception as error:  # the recipe is the user's own program
        raise UserError(
            f"{recipe} could not be loaded: {type(error).__name__}: {first_line(error)}"
        ) from None
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise UserError(
            f"{recipe} has no {' and no '.join(missing)}, by which a plan knows its model; see recipes/gpt.py."
        )

    settings: AnySettings = parse(names["DEFAULTS"], flags)
    with contextlib.redirect_stdout(io.StringIO()):
        rows = names["tokenized"](settings)
        try:
            with torch.device("meta"):
                bundle: ModelBundle | nn.Module = names["build"](settings, rows, precision)
        except (RuntimeError, NotImplementedError) as error:  # it reads the value of a tensor
            raise UserError(
                f"{recipe}: build() needs values of weights, and a plan has none: {first_line(error)}"
            ) from None

    if isinstance(bundle, ModelBundle):
        model = bundle.model
        objective = bundle.objective
    else:
        model = bundle
        objective = Objective()
    make_trainable(model)
    if isinstance(model, CausalLM):
        # A run tries this with values. Nearly all models have a linear head.
        model.head_is_linear = head_of(model) is not None
    return Subject(
        model=model,
        settings=settings,
        precision=precision,
        positions=rows.positions,
        objective=objective,
    )
