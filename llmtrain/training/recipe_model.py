"""The model that a recipe trains, built by the recipe itself on the meta device."""

import contextlib
import inspect
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

from llmtrain.errors import UserError, explain, first_line
from llmtrain.launching.accelerator import forget_accelerator
from llmtrain.planning import planning
from llmtrain.training.predicted_memory import RecipeModel
from llmtrain.training.start import PlannedModel


def build_recipe_model(recipe: str, flags: list[str], precision: str) -> RecipeModel:
    """Return the model that a recipe would train with these flags.

    The recipe's own ``main`` runs until the model is built. Its data is tokenised before that,
    because the vocabulary determines the size of the model. What it prints is left out, unless it
    ends like ``--help``.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        precision: mixed precision, ``no`` or ``bf16``.

    Raises:
        UserError: if the file is not a recipe, or its model cannot be built without weights.
    """
    printed = io.StringIO()
    # The recipe finds its flags and the modules of its folder, as when Python runs it.
    folder = str(Path(recipe).resolve().parent)
    try:
        with (
            planning(precision),
            mock.patch.object(sys, "argv", [recipe, *flags]),
            mock.patch.object(sys, "path", [folder, *sys.path]),
            contextlib.redirect_stdout(printed),
        ):
            _run_main(recipe, flags)
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


def _run_main(recipe: str, flags: list[str]) -> None:
    """Load a recipe, and call its ``main``.

    Raises:
        UserError: if there is no ``main`` in it.
    """
    main = runpy.run_path(recipe, run_name="llmtrain.recipe").get("main")
    if not callable(main):
        raise UserError(
            f"{recipe} has no function main, which this command calls; see recipes/gpt.py."
        )

    if inspect.signature(main).parameters:
        main(flags)
    else:
        main()
