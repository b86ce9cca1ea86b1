"""The interface between the training step and the parallel method.

Each way to train has its own subclass:

- :class:`llmtrain.parallel.ddp.ReplicatedEngine`: every rank holds the full model.
- :class:`llmtrain.parallel.fsdp.ShardedEngine`: every rank holds a shard of it.
- :class:`llmtrain.parallel.bitwise.BitwiseEngine`: as replicated, and the same bits on any number
  of ranks.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from llmtrain.device_numbers import widest_dtype
from llmtrain.errors import UserError, short_repr
from llmtrain.interfaces.batches import Batch, count_targets
from llmtrain.interfaces.callback import StopVote
from llmtrain.interfaces.objective import (
    FINISH_VOTE,
    SAVE_VOTE,
    LossSums,
    Objective,
    StepTotals,
)
from llmtrain.interfaces.part import name_of
from llmtrain.parallel.ranks import Ranks
from llmtrain.phases import Phases

Result = TypeVar("Result")
# The future of a bucket's mean over the ranks. It is complete once all ranks have sent the bucket.
BucketFuture: TypeAlias = torch.futures.Future[torch.Tensor]
# Begins to average a bucket over the ranks, and does not wait for the mean.
BucketAverage: TypeAlias = Callable[[GradBucket], BucketFuture]
# Takes a full bucket and the function that averages it. Returns the future of the mean.
BucketWatcher: TypeAlias = Callable[[GradBucket, BucketAverage], BucketFuture]


class Engine:
    """The model and its parallel method.

    Several methods take ``extra``: inputs of the loss that depend on the whole global batch, which
    :meth:`llmtrain.interfaces.objective.Objective.prepass` has computed.

    Args:
        ranks: the ranks that train the model.
        model: the model that ``accelerator.prepare`` returned.
        objective: the loss that is minimised.
        frozen: further models by name, which the objective may run.
        sync_each_batch: reduce the gradient after every micro-batch. A rank of a sharded model then
            never holds more of the gradient than its own shard and one unsharded block.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        objective: Objective | None = None,
        sync_each_batch: bool = False,
        frozen: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self.ranks = ranks
        self.accelerator = ranks.accelerator
        self.device = ranks.device
        self.model = model
        self.unwrapped = unwrap(model)
        self.objective = objective or Objective()
        self.sync_each_batch = sync_each_batch
        self._frozen = frozen
        self.phases = Phases(self.device, model)
        # Backward passes of the last step that have reduced gradients over the ranks. However many
        # micro-batches a step has, it needs one. More would change no number, and take longer.
        self.gradient_syncs = 0

    # --- passes through the model

    def call_in_forward(self, function: Callable[[Any, Batch], Result], batch: Batch) -> Result:
        """Return ``function(unwrapped model, batch)``, called inside ``model.forward``.

        The hooks of DDP and FSDP2, and autocast, are around ``forward``. So everything that uses
        the weights has to run inside it. The model's ``forward`` takes the function as its argument
        ``compute``; :func:`llmtrain.models.trainable.make_trainable` gives any model such a
        ``forward``.
        """
        result: Result = self.model(**batch, compute=function)
        return result

    def frozen(self, name: str, function: Callable[[Any, Batch], Result], batch: Batch) -> Result:
        """Return ``function(model, batch)`` of a frozen model, called inside its ``forward``.

        If models are sharded, all ranks call this.
        """
        self.phases.begin_pass("forward")
        with torch.no_grad(), self.accelerator.autocast():
            result: Result = self._frozen[name](**batch, compute=function)
        return result

    def loss(self, batch: Batch, extra: Batch | None = None) -> LossSums:
        """Return the summed loss of a micro-batch, and its sums of further metrics.

        Raises:
            UserError: if the objective returns something else.
        """
        frozen_inputs = self.objective.frozen_inputs(self, batch)
        sums = self.call_in_forward(
            lambda model, batch: self.objective.loss(model, batch | frozen_inputs, extra or {}),
            batch,
        )
        _check_sums(self.objective, sums)
        return sums

    def warm_up_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch, for a pass whose gradients are thrown away.

        The objective's prepass has the micro-batches of all ranks, which call this together.
        """
        phase = self.phases.phase
        totals = self.count([batch])
        extra = self.objective.prepass(self, [batch], totals)
        divisor = totals.divisor
        self.phases.begin(phase)
        loss = self.loss(batch, extra).loss
        return loss / divisor.to(loss.dtype)

    def denominator(self, batch: Batch) -> Tensor:
        """Return the objective's denominator of a micro-batch.

        Raises:
            UserError: if the objective returns something else than a tensor without dimensions.
        """
        denominator = self.objective.denominator(batch)
        if not is_scalar(denominator):
            raise UserError(
                f"{name_of(self.objective)}.denominator returned {short_repr(denominator)}; return "
                "a tensor without dimensions, on the device of the batch."
            )
        return denominator

    def count(self, batches: Iterable[Batch], stop_requested: StopVote = False) -> StepTotals:
        """Count target tokens, the denominator and the votes to stop over the global batch.

        One all-reduce carries all three. This begins it, and does not wait for it.
        """
        vote = FINISH_VOTE if stop_requested == "finish" else SAVE_VOTE * bool(stop_requested)
        target_tokens = []
        denominators = []
        for batch in batches:
            target_tokens.append(count_targets(batch["labels"]))
            denominators.append(self.denominator(batch))
        columns = [torch.stack(target_tokens), torch.stack(denominators)]
        # A tensor copied from the host would make the host wait for the device.
        columns.append(torch.full_like(columns[0], vote))
        counts_integers = not columns[1].is_floating_point()
        if widest_dtype(self.device) != torch.float64:  # one process, on a Mac
            return StepTotals([column.sum() for column in columns], None, counts_integers)

        counts = torch.stack([column.double() for column in columns], dim=1)
        total, work = self._start_sum(counts)
        return StepTotals(total, None if work is None else work.wait, counts_integers)

    def _start_sum(self, counts: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to sum the counts of all micro-batches over the ranks; all ranks call this.

        Args:
            counts: the counts of this rank, [micro-batches, N].

        Returns:
            The sum, and the work to wait for before it is read, if there is some.
        """
        total = counts.sum(0)
        if self.ranks.world_size == 1:
            return total, None
        return total, dist.all_reduce(total, async_op=True)

    @torch.no_grad()
    def sum_over_batches(
        self, function: Callable[[Any, Batch], Tensor], batches: Iterable[Batch]
    ) -> Tensor:
        """Sum a function of the model over all micro-batches of the global batch.

        This pass has no gradients. Afterwards the state of torch's generators is as before, so that
        the training pass draws the same dropout as without it. All ranks call this.

        Args:
            function: called with the unwrapped model and a micro-batch, inside ``model.forward``.
            batches: this rank's micro-batches.
        """
        self.phases.begin("forward")
        with self.fork_rng():
            results = [self.call_in_forward(function, batch) for batch in batches]
        local_sum = torch.stack(results).sum(0)

        self.phases.begin("exchange")
        return self.ranks.sum_over_ranks(local_sum)

    def sum_of_micro_batches(self, values: Tensor) -> Tensor:
        """Return the sum over the micro-batches of all ranks; all ranks call this.

        Args:
            values: this rank's values, float [micro-batches, N]. Every rank has as many, and
                micro-batches of the same index were divided among the ranks in rank order.

        Returns:
            The sum, [N].
        """
        return self.ranks.sum_over_ranks(values.sum(0))

    def forward_backward(
        self, batches: Sequence[Batch], totals: StepTotals, extra: Batch | None = None
    ) -> LossSums:
        """Leave the gradient of the mean loss of the global batch in ``.grad``.

        The gradient is accumulated over the micro-batches, and reduced over the ranks after the
        last one.

        Args:
            batches: this rank's micro-batches.
            totals: counts over the global batch.
            extra: inputs of the loss that depend on the whole global batch.

        Returns:
            This rank's sums.
        """
        # DDP and FSDP2 average over the ranks. Multiplying by their number undoes that.
        scale = self.ranks.world_size
        loss_sum = torch.zeros((), device=self.device)
        metric_sums: dict[str, Tensor] = {}
        self.gradient_syncs = 0
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            reduces = is_last or self.sync_each_batch
            sync_context = contextlib.nullcontext() if reduces else self.no_sync()
            with sync_context:
                self.gradient_syncs += self.reduces_gradients
                sums = self.loss(batch, extra)
                # Accelerate divides this by its gradient_accumulation_steps, which is 1 here.
                divisor = self._divisor(totals).to(sums.loss.dtype)
                self.accelerator.backward(sums.loss * scale / divisor)
            loss_sum += sums.loss.detach()
            add_sums(metric_sums, sums.metrics)
        return LossSums(loss_sum, metric_sums)

    def _divisor(self, totals: StepTotals) -> Tensor:
        """Return what a summed loss is divided by, after waiting for the other ranks' counts."""
        if totals.are_pending:
            self.phases.begin("count")
            divisor = totals.divisor
            self.phases.begin("backward")
            return divisor
        return totals.divisor

    @property
    def reduces_gradients(self) -> bool:
        """Whether a backward pass now reduces its gradients over the ranks."""
        return False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a backward pass reduces no gradients."""
        context: contextlib.AbstractContextManager[None] = self.accelerator.no_sync(self.model)
        return context

    def rebuild_buckets(self, batch: Batch) -> None:
        """Rebuild the buckets of gradients before the first step of a resumed run.

        DDP rebuilds them in the first step of a run. A resumed run does so at once, to add up
        gradients in the same order as a run that never stopped. Other engines have no buckets, so
        there is nothing to do here.
        """

    @contextlib.contextmanager
    def fork_rng(self) -> Iterator[None]:
        """Restore the state of torch's generators when the block ends."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield

    # --- gradients and weights

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to ``max_norm`` if its norm is larger.

        Returns:
            The norm before; a scalar, the same on every rank.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if all(p.dtype != torch.bfloat16 for p in parameters):
            norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
            return norm

        norm = _norm_in_float32([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @torch.no_grad()
    def weight_norm(self) -> Tensor:
        """Return the norm of all trained weights; a scalar, the same on every rank."""
        trained = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if any(p.dtype == torch.bfloat16 for p in trained):
            return _norm_in_float32(trained)
        return nn.utils.get_total_norm(trained)

    def watching_buckets(self, watcher: BucketWatcher) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a watcher sees the buckets of gradients, if there are any."""
        return contextlib.nullcontext()


def _norm_in_float32(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together.

    torch's own function would round the norm of each tensor to its dtype.
    """
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP and of a compiler."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def add_sums(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Add the sums of a micro-batch to the totals, in place and without their graphs."""
    for name, value in sums.items():
        detached = value.detach()
        totals[name] = totals[name] + detached if name in totals else detached


def check_denominator(objective: Objective, denominator: float) -> None:
    """Raise :class:`UserError` if a sum of denominators is negative or not finite."""
    if not 0 <= denominator < math.inf:
        raise UserError(
            f"the sum of {name_of(objective)}.denominator over all micro-batches is negative or "
            "not finite; return numbers whose sum is neither, such as a sum of weights."
        )


def _check_sums(objective: Objective, sums: object) -> None:
    """Raise :class:`UserError` unless an objective returned sums, as it must."""
    if not isinstance(sums, LossSums):
        raise UserError(
            f"{name_of(objective)}.loss returned {short_repr(sums)}; return "
            "llmtrain.LossSums(loss=...), with the loss summed over the micro-batch."
        )
    if not is_scalar(sums.loss):
        raise UserError(
            f"{name_of(objective)}.loss returned {short_repr(sums.loss)} as its loss; return a "
            "tensor without dimensions, summed over the micro-batch."
        )
    check_metrics(
        f"{name_of(objective)}.loss",
        sums.metrics,
        is_value=is_scalar,
        wanted="a tensor without dimensions, summed over the micro-batch",
    )


def check_metrics(
    source: str, metrics: object, is_value: Callable[[object], bool], wanted: str
) -> None:
    """Raise :class:`UserError` unless a function of the user returned values by name.

    Args:
        source: the function, for the message.
        metrics: what it returned.
        is_value: returns whether a value is valid.
        wanted: a valid value, for the message.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{source} returned {short_repr(metrics)}; return a dictionary by name, and as each "
            f"value {wanted}."
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise UserError(
                f"{source} returned a metric with the name {name!r}; a name is a text, and not "
                "empty."
            )
        if not is_value(value):
            raise UserError(f"{source} returned {short_repr(value)} as {name}; return {wanted}.")


def is_scalar(value: object) -> bool:
    """Return whether this is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.dim() == 0
