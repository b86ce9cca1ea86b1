"""The loss that a run minimises, and the sums and counts that it consists of."""

from __future__ import annotations  # so that annotations do not import torch

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from llmtrain.interfaces.batches import Batch, count_targets, target_weights
from llmtrain.interfaces.part import Part

if TYPE_CHECKING:
    import torch

# Votes to stop are added up. A vote to save outweighs any number of votes to finish.
FINISH_VOTE = 1
SAVE_VOTE = 2**40


class LossSums(NamedTuple):
    """Sums of the loss and of further metrics, over one or several micro-batches."""

    loss: torch.Tensor  # a sum, not a mean; scalar
    metrics: Mapping[str, torch.Tensor] = MappingProxyType({})  # sums of further metrics; scalars


class StepTotals:
    """Counts over the global batch, before its gradient is computed; scalars.

    The ranks add them up while the forward pass begins. Reading a count waits for the sum.

    Args:
        counts: the target tokens, the denominator and the votes to stop; float64 [3] or three
            scalars. Float64 holds any count.
        wait: called before the first count is read, if the sum may not be there yet.
        counts_integers: whether the denominator is a sum of integers.
    """

    def __init__(
        self,
        counts: torch.Tensor | Sequence[torch.Tensor],
        wait: Callable[[], object] | None = None,
        counts_integers: bool = True,
    ) -> None:
        self._counts = counts
        self._wait = wait
        self._counts_integers = counts_integers

    @property
    def are_pending(self) -> bool:
        """Whether reading a count may have to wait for other ranks."""
        return self._wait is not None

    @property
    def target_tokens(self) -> torch.Tensor:
        """The number of target tokens, int64."""
        return self._read(0).long()

    @property
    def denominator(self) -> torch.Tensor:
        """The sum of the objective's denominators, int64 if they are integers, else float64."""
        denominator = self._read(1)
        return denominator.long() if self._counts_integers else denominator

    @functools.cached_property
    def divisor(self) -> torch.Tensor:
        """What the summed loss is divided by: the denominator, or 1 if that is 0.

        It is NaN if the denominator is negative or not finite, so that no step is made.
        """
        denominator = self._read(1)
        if not denominator.is_floating_point():
            denominator = denominator.float()
        is_valid = (denominator >= 0) & denominator.isfinite()
        # `torch.where` would copy its numbers to the device, and wait for that.
        return denominator.masked_fill(denominator == 0, 1).masked_fill(~is_valid, math.nan)

    @property
    def stop_votes(self) -> torch.Tensor:
        """The sum of the ranks' votes: :data:`FINISH_VOTE` or :data:`SAVE_VOTE`, or 0."""
        return self._read(2).long()

    def _read(self, index: int) -> torch.Tensor:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._counts[index]


class Objective(Part):
    """The loss that a run minimises; by default the mean negative log-likelihood per target token.

    The loss of a step is a sum over the whole global batch, divided by one denominator. So every
    method works on sums, which add up over micro-batches and ranks.

    If the rows have a column ``loss_weight``, each target token counts with its weight: the loss is
    sum(weight * nll) / sum(weight) over the global batch. A loss of your own finds the weights in
    ``batch["loss_weight"]`` [B, T]. Weight t belongs to label t.
    """

    # Numbers that `reference` returns for each row; 0 if the objective has no reference.
    reference_size: int = 0
    # What `reference` depends on besides the initial weights and the rows, such as a hash of a
    # teacher's weights. References in the cache are only used for the same source.
    reference_source: str = ""
    # Whether the eval loss needs `prepass`, too.
    uses_prepass_in_eval: bool = False

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        """Return the summed loss of a micro-batch, and the sums of further metrics.

        This runs inside ``model.forward``, with weights gathered and autocast on.

        Args:
            model: the unwrapped model, with the methods of :class:`llmtrain.Model`.
            batch: a micro-batch by column, among them ``input_ids`` and ``labels`` [B, T]. If rows
                are not packed, they are trimmed, so T differs between micro-batches.
            extra: what :meth:`prepass` returned for the global batch.
        """
        if "loss_weight" not in batch:
            return LossSums(model.nll(**batch), metrics={})

        nll = model.nll(**batch, per_target=True)
        weights = target_weights(batch).flatten()
        positions = batch.get("target_positions")
        if positions is not None:
            weights = weights[positions.clamp(min=0)]  # padding has an nll of 0
        return LossSums((nll * weights).sum())

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Return the micro-batch's part of the denominator, a scalar of integers or floats.

        By default this is the number of its target tokens, after the shift, or the sum of their
        weights if there is a column ``loss_weight``. So override it if your loss ignores that
        column. The sum over the global batch must be finite and not negative.
        """
        if "loss_weight" in batch:
            return target_weights(batch).sum()
        return count_targets(batch["labels"])

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Return extra inputs of :meth:`loss` that depend on the whole global batch.

        All ranks call this before the first forward pass of a step. An objective that needs a
        separate pass uses ``engine.sum_over_batches``. With :attr:`uses_prepass_in_eval`, they call
        it before an evaluation, too, whose global batch is all eval rows.

        Args:
            engine: how this process computes.
            batches: this rank's micro-batches. They can be read once.
            totals: counts over the global batch.
        """
        return {}

    def frozen_inputs(self, engine: Any, batch: Batch) -> Batch:
        """Return further inputs of :meth:`loss` that frozen models compute of a micro-batch.

        This runs before the forward pass of the micro-batch. ``engine.frozen(name, function,
        batch)`` returns ``function(model, batch)`` for a model of ``ModelBundle.frozen``.
        """
        return {}

    def reference(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return numbers of a reference model or a teacher, float [B, ``reference_size``].

        They are computed once, before training, and become the column ``reference`` of the rows.
        This runs inside ``model.forward``.
        """
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        """Return further metrics, given their sums over the global batch."""
        return {}

    def eval_metrics(self, loss_sum: float, mean_loss: float, text_bytes: int) -> dict[str, float]:
        """Return metrics that follow from the eval loss.

        Args:
            loss_sum: the loss summed over all eval rows.
            mean_loss: that sum divided by the denominator.
            text_bytes: UTF-8 bytes of the eval text; 0 if the rows are no text, or have weights.
                Bits per byte compare models with different tokenizers.
        """
        metrics = {"perplexity": math.exp(min(mean_loss, 700.0))}
        if text_bytes:
            metrics["bits_per_byte"] = loss_sum / math.log(2) / text_bytes
        return metrics

    def check(self, model: Any) -> None:
        """Check that the objective works with a model that has its weights; all ranks call this.

        Raises:
            UserError: if it does not.
        """
