"""What a recipe would train, without memory for it: the recipe itself builds its model, on the meta device."""

import contextlib
import dataclasses
import io
import runpy
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from llmtrain import start
from llmtrain.config import parse
from llmtrain.errors import UserError, first_line
from llmtrain.parallel.paper import PaperAccelerator, Taken


class Subject(NamedTuple):
    model: Any  # on the meta device
    settings: Any  # every flag of the recipe by its name
    precision: str  # "no" or "bf16"

    @property
    def positions(self) -> int:
        """Of a row, that a micro-batch computes."""
        return self.settings.block_size

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return self.model.config.n_embd if hasattr(self.model, "keep") else self._text.hidden_size

    @property
    def blocks(self) -> int:
        return self.model.config.n_layer if hasattr(self.model, "keep") else self._text.num_hidden_layers

    @property
    def flops_per_token(self) -> int:
        """Forward and backward; 0 where nobody knows."""
        found = getattr(self.model, "flops_per_token", None)
        return found() if found is not None else 0

    @property
    def _text(self) -> Any:
        return self.model.config.get_text_config()


def subject_of(recipe: str, flags: list[str], precision: str) -> Subject:
    """Of a recipe with these flags. It prepares its data, whose vocabulary is a size of the model, and gets as far as
    where its model would be spread over processes. Raises :class:`UserError` where it does not."""
    try:
        found = runpy.run_path(recipe, run_name="llmtrain.recipe")
    except Exception as error:  # it is somebody's program, or none
        raise UserError(f"{recipe} could not be loaded: {type(error).__name__}: {first_line(error)}") from None
    main, defaults = found.get("main"), found.get("DEFAULTS")
    if main is None or defaults is None:
        raise UserError(f"{recipe} has no main(argv) and DEFAULTS, by which a plan knows it; see recipes/gpt.py.")
    settings = _joined(parse(*defaults, argv=flags))
    start.paper = PaperAccelerator(precision)
    try:
        with contextlib.redirect_stdout(io.StringIO()), _called(recipe):
            main(flags)
    except Taken as taken:
        model: Any = taken.model
        if hasattr(model, "head_is_linear"):  # which is found out by values; nearly all are
            model.head_is_linear = True
        return Subject(model, settings, precision)
    finally:
        start.paper = None
    raise UserError(f"{recipe} does not call shard(accelerator, model, weights), where a plan takes its model.")


def _joined(configs: tuple[Any, ...]) -> Any:
    fields = {field.name: getattr(config, field.name) for config in configs for field in dataclasses.fields(config)}
    return dataclasses.make_dataclass("Settings", fields)(**fields)


@contextlib.contextmanager
def _called(recipe: str) -> Iterator[None]:
    """With the name of the program that its errors show."""
    before, sys.argv = sys.argv, [recipe]
    try:
        yield
    finally:
        sys.argv = before
