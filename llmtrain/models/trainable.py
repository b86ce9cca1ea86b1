"""A ``forward`` in which any objective can compute, for every kind of model.

It is mixed in before the model's class, so its ``forward`` runs first. No wrapper module is made: a
wrapper would rename the parameters, and hide from FSDP which modules are blocks. The class of an
existing model is replaced by a subclass, which :func:`put_in_front` makes. Classes are made at run
time nowhere else:

- a model of transformers becomes ``(CausalLM, LlamaForCausalLM)``, for example;
- its head becomes ``(LossHead, Linear)``, and a convolution of LFM2 a ``ShortConvolution``;
- a custom model of the user becomes ``(CustomModel, Own)``, with methods that it lacks.

The models of this package inherit from :class:`TrainableModel`, and need no other class.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.models.loss import inputs_of, summed_nll, targets_of


class TrainableModel(nn.Module):
    """A model whose ``forward`` also runs what an objective computes.

    DDP and FSDP2 communicate in hooks around ``forward``, and Accelerate's autocast is there too.
    So whatever is computed with the weights has to run inside ``forward``, and an objective cannot
    call other methods of the model from outside. Subclasses have the methods of
    :class:`llmtrain.interfaces.model.Model`.

    Attributes:
        gives_outputs: whether the model can be called without labels.
        takes_position_ids: whether it can be called with the position ids of packed rows.
    """

    gives_outputs: bool = True
    takes_position_ids: bool = True

    nll: Callable[..., Tensor]
    outputs: Callable[..., Any]  # logits [B, T, V], or an object that has them

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        compute: Callable[[Any, Batch], Any] | None = None,
        **columns: Any,
    ) -> Any:
        """Compute one of three results for a micro-batch.

        Args:
            input_ids: tokens [B, T].
            labels: tokens [B, T], which are not shifted; -100 is ignored.
            compute: a function of the unwrapped model and the micro-batch.
            columns: the other columns of the micro-batch.

        Returns:
            What ``compute`` returns, if it is given. Otherwise the summed negative log-likelihood
            in nats, if there are labels. Otherwise the outputs of the model: logits [B, T, V], or
            an object that has them.
        """
        if compute is not None:
            return compute(self, {"input_ids": input_ids, "labels": labels, **columns})
        return self.loss_or_outputs(input_ids, labels, **columns)

    def loss_or_outputs(self, input_ids: Tensor, labels: Tensor | None, **columns: Any) -> Any:
        """Return the summed loss of a micro-batch, or outputs if it has no labels."""
        if labels is not None:
            return self.nll(input_ids=input_ids, labels=labels, **columns)
        return self.outputs(input_ids=input_ids, **columns)

    def own_forward(self, *inputs: Any, **arguments: Any) -> Any:
        """Call the ``forward`` of the model's own class, which comes after this class."""
        return super().forward(*inputs, **arguments)


class CustomModel(TrainableModel):
    """A model of the user, whose ``forward`` returns the summed loss if it gets labels.

    Its methods and modules may have any names, so this class adds none of the protocol.

    Attributes:
        column_names: the names of the parameters of its ``forward``, which gets no other columns;
            ``None`` if it takes any name.
    """

    own_class: ClassVar[type]
    column_names: frozenset[str] | None = None

    def loss_or_outputs(self, input_ids: Tensor, labels: Tensor | None, **columns: Any) -> Any:
        columns.pop("reference", None)  # numbers of the objective, which no model takes
        names = self.column_names
        if names is not None:  # the other columns are for the objective or a metric
            columns = {name: column for name, column in columns.items() if name in names}
        if labels is not None:
            return self.own_forward(input_ids, labels, **columns)
        return self.own_forward(input_ids, **columns)


# --- methods of the protocol that follow from the forward of a custom model


def _derived_nll(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    target_positions: Tensor | None = None,
    per_target: bool = False,
    **columns: Any,
) -> Tensor:
    if not per_target:
        loss: Tensor = model.loss_or_outputs(input_ids, labels, **columns)
        return loss
    logits = _derived_logits(model, input_ids, **columns)
    return nll_of_logits(logits, labels, target_positions, per_target)


def _derived_logits(model: Any, input_ids: Tensor, **columns: Any) -> Tensor:
    """Return the logits [B, T - 1, V] that ``forward`` returns if it gets no labels.

    The last token of each row is left out, and the last position of every column [B, T].

    Raises:
        UserError: if ``forward`` only returns a loss.
    """
    if not model.gives_outputs:
        raise UserError(
            f"{model.own_class.__name__} only returns a loss, and logits are needed; give the "
            "parameter `labels` of its forward the default None, and return logits then."
        )
    inputs = Batch(columns, labels=None)
    for name, column in inputs.items():
        if isinstance(column, Tensor) and column.shape[:2] == input_ids.shape:
            inputs[name] = inputs_of(column)
    output = model.loss_or_outputs(inputs_of(input_ids), **inputs)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _derived_logits_at(model: Any, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
    logits = _derived_logits(model, input_ids, **columns)
    return logits.flatten(0, 1).index_select(0, positions).float()


_DERIVED_METHODS = {
    "nll": _derived_nll,
    "logits": _derived_logits,
    "logits_at": _derived_logits_at,
}


def nll_of_logits(
    logits: Tensor, labels: Tensor, target_positions: Tensor | None, per_target: bool
) -> Tensor:
    """Return what :meth:`llmtrain.interfaces.model.Model.nll` does, given logits [B, T - 1, V]."""
    nll = summed_nll(logits, targets_of(labels), per_target)
    if target_positions is None or not per_target:
        return nll
    is_padding = target_positions < 0
    return nll[target_positions.clamp(min=0)].where(~is_padding, 0)


def make_trainable(model: nn.Module) -> nn.Module:
    """Let objectives compute inside the ``forward`` of any model, which is changed in place.

    Its own methods and modules stay, such as a layer that is called ``logits``.

    Raises:
        UserError: if the model uses the name ``nll`` for something else than a method.
    """
    if isinstance(model, TrainableModel):
        return model

    if hasattr(model, "nll") and not inspect.ismethod(model.nll):
        raise UserError(
            f"{type(model).__name__}.nll is another thing than the method nll(input_ids, labels) "
            "that an objective calls; rename it."
        )

    parameters = inspect.signature(model.forward).parameters
    labels = parameters.get("labels")
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    missing = tuple(name for name in _DERIVED_METHODS if not hasattr(model, name))
    put_in_front(CustomModel, model, derived=missing)
    custom_model = cast(CustomModel, model)
    custom_model.gives_outputs = labels is None or labels.default is not labels.empty
    custom_model.takes_position_ids = takes_any_name or "position_ids" in parameters
    custom_model.column_names = None if takes_any_name else frozenset(parameters)
    return custom_model


def put_in_front(mixin: type, module: nn.Module, derived: tuple[str, ...] = ()) -> None:
    """Give a module a subclass of its own class, in which the methods of ``mixin`` come first.

    It also gets some of the derived methods of custom models, by their names.
    """
    module.__class__ = _with_mixin(mixin, type(module), derived)  # type: ignore[arg-type]


@functools.cache  # compiled code is made anew for every class
def _with_mixin(mixin: type, own_class: type, derived: tuple[str, ...]) -> type:
    methods = {name: _DERIVED_METHODS[name] for name in derived}
    return type(own_class.__name__, (mixin, own_class), {"own_class": own_class, **methods})
