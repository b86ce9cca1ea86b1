"""The interface of a model that is trained: a ``forward`` in which any objective can compute."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from llmtrain.interfaces.batches import Batch

Result = TypeVar("Result")
# Computes something of the unwrapped model and a micro-batch, inside the model's `forward`.
Compute: TypeAlias = Callable[[Any, Batch], Result]


class TrainableModel(nn.Module):
    """A model whose ``forward`` also runs what an objective computes.

    DDP and FSDP2 communicate in hooks around ``forward``, and Accelerate's autocast is there too.
    So whatever is computed with the weights has to run inside ``forward``, and an objective cannot
    call other methods of the model from outside.
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

    def nll(self, input_ids: Tensor, labels: Tensor, **columns: Any) -> Tensor:
        """Return the negative log-likelihood of the labels in nats, summed over a micro-batch.

        Call this inside ``forward`` only.
        """
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


class _WithOwnForward(TrainableModel):
    """A custom model of the user, whose ``forward`` returns the summed loss if it gets labels."""

    def nll(self, input_ids: Tensor, labels: Tensor, **columns: Any) -> Tensor:
        loss: Tensor = super(TrainableModel, self).forward(input_ids, labels, **columns)
        return loss

    def outputs(self, input_ids: Tensor, **columns: Any) -> Any:
        return super(TrainableModel, self).forward(input_ids, **columns)

    @property
    def gives_outputs(self) -> bool:
        labels = inspect.signature(super(TrainableModel, self).forward).parameters.get("labels")
        return labels is None or labels.default is not labels.empty

    @property
    def takes_position_ids(self) -> bool:
        parameters = inspect.signature(super(TrainableModel, self).forward).parameters
        takes_any_column = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return takes_any_column or "position_ids" in parameters


def make_trainable(model: nn.Module) -> nn.Module:
    """Let objectives compute inside the ``forward`` of any model. The model is changed in place.

    The model gets a subclass of its own class, and no wrapper: a wrapper would rename its
    parameters and hide from FSDP which of its modules are blocks.
    """
    if not isinstance(model, TrainableModel):
        put_in_front(_WithOwnForward, model)
    return model


def put_in_front(mixin: type, module: nn.Module) -> None:
    """Give a module a subclass of its own class in which the methods of ``mixin`` come first."""
    module.__class__ = _with_mixin(mixin, type(module))  # type: ignore[arg-type]


@functools.cache  # compiled code is made anew for every class
def _with_mixin(mixin: type, own_class: type) -> type:
    return type(own_class.__name__, (mixin, own_class), {"own_class": own_class})
