"""A ``forward`` in which any objective can compute, and the protocol of a model for any module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import class_name
from llmtrain.models.loss import inputs_of, summed_nll, targets_of

Result = TypeVar("Result")
# Computes something of the unwrapped model and a micro-batch, inside the model's `forward`.
Compute: TypeAlias = Callable[[Any, Batch], Result]


class TrainableModel(nn.Module):
    """A model whose ``forward`` also runs what an objective computes.

    DDP and FSDP2 communicate in hooks around ``forward``, and Accelerate's autocast is there too.
    So whatever is computed with the weights has to run inside ``forward``, and an objective cannot
    call other methods of the model from outside. Subclasses have the methods of
    :class:`llmtrain.interfaces.model.Model`.
    """

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        compute: Compute[Any] | None = None,
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
            batch = {"input_ids": input_ids, "labels": labels, **columns}
            return compute(self, batch)
        if labels is not None:
            return self.nll(input_ids=input_ids, labels=labels, **columns)
        return self.outputs(input_ids=input_ids, **columns)

    def nll(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        """See :meth:`llmtrain.interfaces.model.Model.nll`."""
        raise NotImplementedError

    def outputs(self, input_ids: Tensor, **columns: Any) -> Any:
        """Return logits [B, T, V], or an object that has them.

        Call this inside ``forward`` only.
        """
        raise NotImplementedError

    @property
    def gives_outputs(self) -> bool:
        """Whether the model can be called without labels."""
        return True

    @property
    def takes_position_ids(self) -> bool:
        """Whether the model can be called with the position ids of packed rows."""
        return True


class _WithOwnForward(nn.Module):
    """A custom model of the user, whose ``forward`` returns the summed loss if it gets labels.

    It does not inherit from :class:`TrainableModel`, whose names would hide modules and methods of
    the user, such as a layer that is called ``outputs``.
    """

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        compute: Compute[Any] | None = None,
        **columns: Any,
    ) -> Any:
        if compute is not None:
            batch = {"input_ids": input_ids, "labels": labels, **columns}
            return compute(self, batch)
        if labels is not None:
            return super().forward(input_ids, labels, **columns)
        return super().forward(input_ids, **columns)

    @property
    def gives_outputs(self) -> bool:
        labels = inspect.signature(super().forward).parameters.get("labels")
        return labels is None or labels.default is not labels.empty

    @property
    def takes_position_ids(self) -> bool:
        return _takes(super().forward, "position_ids")


class _Derived:
    """Methods of the protocol that follow from the ``forward`` of a custom model."""

    def nll(
        self: Any,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        if not per_target:
            columns.pop("reference", None)  # numbers of the objective, which no model takes
            loss: Tensor = _WithOwnForward.forward(self, input_ids, labels, **columns)
            return loss
        logits = _logits_of_forward(self, input_ids, columns)
        nll = summed_nll(logits, targets_of(labels), per_target=True)
        return nll if target_positions is None else at_targets(nll, target_positions)

    def logits(self: Any, input_ids: Tensor, **columns: Any) -> Tensor:
        return _logits_of_forward(self, input_ids, columns)

    def logits_at(self: Any, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
        logits = _logits_of_forward(self, input_ids, columns)
        return logits.flatten(0, 1).index_select(0, positions).float()

    def run_layers(self: Any, input_ids: Tensor, labels: Tensor, **columns: Any) -> None:
        columns.pop("reference", None)
        _WithOwnForward.forward(self, input_ids, labels, **columns)


_DERIVED = ("nll", "logits", "logits_at", "run_layers")


def _logits_of_forward(model: Any, input_ids: Tensor, columns: Batch) -> Tensor:
    """Return the logits [B, T - 1, V] that the own ``forward`` of a custom model returns.

    The last token of each row is left out, and so is the last position of every column [B, T].

    Raises:
        UserError: if ``forward`` only returns a loss.
    """
    if not model.gives_outputs:
        raise UserError(
            f"{class_name(model)} only returns a loss, and logits are needed; give the parameter "
            "`labels` of its forward the default None, and return logits if it is None."
        )
    inputs = Batch()
    for name, column in columns.items():
        if name in ("labels", "reference"):
            continue
        is_of_tokens = isinstance(column, Tensor) and column.shape[:2] == input_ids.shape
        inputs[name] = inputs_of(column) if is_of_tokens else column
    output = _WithOwnForward.forward(model, inputs_of(input_ids), **inputs)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def at_targets(nll: Tensor, target_positions: Tensor) -> Tensor:
    """Return the nll [N] at some targets, given that of all [B * (T - 1)]; 0 for padding, -1."""
    is_padding = target_positions < 0
    return nll[target_positions.clamp(min=0)].where(~is_padding, 0)


def make_trainable(model: nn.Module) -> nn.Module:
    """Let objectives compute inside the ``forward`` of any model. The model is changed in place.

    The model gets a subclass of its own class, and no wrapper: a wrapper would rename its
    parameters and hide from FSDP which of its modules are blocks. Methods of the protocol that it
    lacks, and that follow from its ``forward``, are added. Its own methods and modules stay.

    Raises:
        UserError: if the model uses the name ``nll`` for something else.
    """
    if isinstance(model, TrainableModel | _WithOwnForward):
        return model

    own_nll = getattr(model, "nll", None)
    if own_nll is not None and not (inspect.ismethod(own_nll) and _takes(own_nll, "input_ids")):
        raise UserError(
            f"{type(model).__name__}.nll is another thing than the method nll(input_ids, labels) "
            "that an objective calls; rename it."
        )

    missing = tuple(name for name in _DERIVED if not hasattr(model, name))
    model.__class__ = _with_mixin(_WithOwnForward, type(model), missing)  # type: ignore[arg-type]
    return model


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function can be called with a keyword argument of that name."""
    parameters = inspect.signature(function).parameters
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any_name or name in parameters


def put_in_front(mixin: type, module: nn.Module) -> None:
    """Give a module a subclass of its own class in which the methods of ``mixin`` come first."""
    module.__class__ = _with_mixin(mixin, type(module))  # type: ignore[arg-type]


@functools.cache  # compiled code is made anew for every class
def _with_mixin(mixin: type, own_class: type, derived: tuple[str, ...] = ()) -> type:
    """Return a subclass of two classes, with some methods of :class:`_Derived`."""
    methods = {name: getattr(_Derived, name) for name in derived}
    return type(own_class.__name__, (mixin, own_class), {"own_class": own_class, **methods})
