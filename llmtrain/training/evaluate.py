"""Measure a model between steps: its eval loss, and text samples."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.metric import Metric
from llmtrain.interfaces.part import name_of
from llmtrain.models.generation import Sampling, continuation_text, sample_token
from llmtrain.parallel.engine import Engine, check_denominator, check_metrics

# An evaluation of the finished model, after its weights were rounded, logs this metric.
ROUNDED_LOSS = "rounded_loss"


class EvalTotals(NamedTuple):
    """Sums over the micro-batches of all ranks: ratios, and the objective's further metrics."""

    ratios: dict[str, tuple[float, float]]  # a numerator and its denominator, by name
    metrics: dict[str, float]


class EvalSums:
    """Sums over eval batches, by source.

    The sums of the micro-batches stay on the device until :meth:`reduce`, because reading one waits
    for the device. Each source has its own sum, because its rows begin with a new batch.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # MPS has no float64.
        on_mps = engine.device.type == "mps"
        self.device = torch.device("cpu") if on_mps else engine.device
        self._names: tuple[list[str], list[str]] = ([], [])  # of the ratios and of the metrics
        # The sums of each micro-batch, by source. Two numbers for each ratio come first, then the
        # metrics: float64 [2 * ratios + metrics].
        self._micro_batches: dict[int, list[torch.Tensor]] = {}

    def add(
        self,
        ratios: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        metrics: Mapping[str, torch.Tensor],
        source: int = 0,
    ) -> None:
        """Add the sums of a micro-batch.

        Args:
            ratios: a sum and its denominator, by name.
            metrics: sums of further metrics, by name.
            source: the number of the source of its rows.

        Raises:
            UserError: if the names differ from those of earlier micro-batches.
        """
        names = (sorted(ratios), sorted(metrics))
        if self._micro_batches and self._names != names:
            raise UserError(
                f"a metric must have the same names for every batch, not {self._names} and {names}."
            )
        self._names = names

        numbers = [number for name in names[0] for number in ratios[name]]
        numbers += [metrics[name] for name in names[1]]
        sums = torch.stack([self._as_float64(number) for number in numbers])
        self._micro_batches.setdefault(source, []).append(sums)

    def _as_float64(self, number: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(number, dtype=torch.float64, device=self.device)

    def reduce(self) -> dict[int, EvalTotals]:
        """Return the totals of each source over all ranks; all ranks call this."""
        totals = [
            self.engine.sum_of_micro_batches(torch.stack(sums))
            for sums in self._micro_batches.values()
        ]
        numbers = torch.stack(totals).tolist()
        return {
            source: self._named(row)
            for source, row in zip(self._micro_batches, numbers, strict=True)
        }

    def _named(self, numbers: list[float]) -> EvalTotals:
        """Return the numbers of a source by their names."""
        ratio_names, metric_names = self._names
        count = 2 * len(ratio_names)
        pairs = zip(numbers[:count:2], numbers[1:count:2], strict=True)
        return EvalTotals(
            ratios=dict(zip(ratio_names, pairs, strict=True)),
            metrics=dict(zip(metric_names, numbers[count:], strict=True)),
        )


def sum_of_sources(totals: Iterable[EvalTotals]) -> EvalTotals:
    """Return the totals of all sources together, added in their order."""
    ratios: dict[str, tuple[float, float]] = {}
    metrics: dict[str, float] = {}
    for source in totals:
        for name, (numerator, denominator) in source.ratios.items():
            earlier = ratios.get(name, (0.0, 0.0))
            ratios[name] = (earlier[0] + numerator, earlier[1] + denominator)
        for name, value in source.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return EvalTotals(ratios, metrics)


def mean(ratio: tuple[float, float]) -> float:
    """Return a sum divided by its denominator; the sum itself if that is 0."""
    total, count = ratio
    return total / (count or 1)


def custom_ratios(
    engine: Engine, metrics: Iterable[Metric], batch: Batch
) -> dict[str, tuple[Any, Any]]:
    """Compute the user's metrics of a micro-batch, inside ``model.forward``.

    Returns:
        A sum and its denominator by name. The denominator 0 keeps the sum a sum.

    Raises:
        UserError: if a metric returns something else, or two have a name in common.
    """
    ratios: dict[str, tuple[Any, Any]] = {}
    for metric in metrics:
        sums = engine.call_in_forward(metric.compute, batch)
        check_metrics(
            f"the metric {name_of(metric)}",
            sums,
            is_value=lambda value: all(map(_is_scalar, _as_ratio(value))),
            wanted="a sum, or a pair of a sum and its denominator, each of them a number or a "
            "tensor without dimensions",
        )
        add_metrics(ratios, {name: _as_ratio(value) for name, value in sums.items()})
    return ratios


def _as_ratio(value: Any) -> tuple[Any, Any]:
    """Return a sum and its denominator, given both or a sum alone."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    return value, 0


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def as_numbers_by_name(source: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that a method of the user, ``source``, has returned.

    Raises:
        UserError: if they are no numbers by name.
    """
    check_metrics(
        source,
        metrics,
        is_value=lambda value: isinstance(value, Real),
        wanted="a number, such as item() of a tensor",
    )
    return {name: float(value) for name, value in metrics.items()}


def add_metrics(metrics: dict[str, Any], further: Mapping[str, Any]) -> None:
    """Add metrics to those of an evaluation or of a log entry, in place.

    Raises:
        UserError: if there is one of the same name already.
    """
    for name, value in further.items():
        if name in metrics or name == ROUNDED_LOSS:
            raise UserError(f"there are two metrics with the name {name}; rename one.")
        metrics[name] = value


@torch.no_grad()
def evaluate(
    engine: Engine,
    eval_batches: Iterable[LocalBatch],
    text_bytes: int,
    metrics: Sequence[Metric] = (),
    sources: Iterable[str] = (),
    extra: Batch | None = None,
) -> dict[str, float]:
    """Return the eval loss over all ranks, and further metrics by name.

    Every target token counts once, whatever the parallel layout.

    Args:
        engine: how this process computes.
        eval_batches: this rank's share of the eval rows.
        text_bytes: UTF-8 bytes of the eval text; 0 if the rows are no text.
        metrics: metrics of the user.
        sources: the names of the sources, by their numbers. ``loss/SOURCE`` is the loss of one
            source. No batch has rows of two sources.
        extra: what the objective's ``prepass`` returned for all eval rows.

    Raises:
        UserError: if two metrics have the same name, or if the names differ between micro-batches.
    """
    sums = EvalSums(engine)
    engine.model.eval()
    for local_batch in eval_batches:
        for batch in local_batch.batches:
            ratios_of_user = custom_ratios(engine, metrics, batch)
            loss = engine.loss(batch, extra)
            batch_ratios = {"loss": (loss.loss, engine.denominator(batch))}
            add_metrics(batch_ratios, ratios_of_user)
            sums.add(batch_ratios, loss.metrics, local_batch.source)
    engine.free_gathered_weights()
    engine.model.train()

    totals = sums.reduce()
    ratios, metric_sums = sum_of_sources(totals.values())
    loss_sum, loss_denominator = ratios.pop("loss")
    objective = engine.objective
    check_denominator(objective, loss_denominator)
    mean_loss = mean((loss_sum, loss_denominator))

    results = {"loss": mean_loss}
    further = {
        "eval_metrics": objective.eval_metrics(loss_sum, mean_loss, text_bytes),
        "metrics": objective.metrics(metric_sums, extra or {}),
    }
    for method, values in further.items():
        add_metrics(results, as_numbers_by_name(f"{name_of(objective)}.{method}", values))
    for number, source in enumerate(sources):
        add_metrics(results, {f"loss/{source}": mean(totals[number].ratios["loss"])})
    add_metrics(results, {name: mean(ratio) for name, ratio in ratios.items()})
    return results


def eval_extra(engine: Engine, read_batches: Callable[[], Iterable[LocalBatch]]) -> Batch:
    """Return the extra inputs that the objective needs for an eval loss.

    Objectives with ``uses_prepass_in_eval`` make a pass over all eval batches for them, as if these
    were one global batch. Another pass counts their targets, without the model.

    Args:
        engine: how this process computes.
        read_batches: returns this rank's share of the eval rows, each time anew.
    """
    if not engine.objective.uses_prepass_in_eval:
        return {}

    def micro_batches() -> Iterator[Batch]:
        for local_batch in read_batches():
            yield from local_batch.batches

    engine.model.eval()
    totals = engine.count(micro_batches())
    return engine.objective.prepass(engine, micro_batches(), totals)


@torch.no_grad()
def sample(
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    stop_token_ids: Collection[int] = (),
) -> list[str]:
    """Generate a continuation of each prompt.

    All ranks call this and compute the same text, because no rank may hold the full model. Torch's
    own generators stay as they are.

    Args:
        engine: computes the model's outputs.
        tokenizer: the tokenizer.
        prompts: the tokens of each prompt.
        sampling: how tokens are chosen, and how many.
        stop_token_ids: the tokens at which an answer ends, besides EOS.
    """
    stops = {tokenizer.eos_token_id, *stop_token_ids}
    model = engine.unwrapped
    was_training = model.training
    model.eval()
    texts = []
    try:
        for number, prompt in enumerate(prompts):
            new_ids = _generate(engine, prompt, sampling, number)
            answer = itertools.takewhile(lambda token: token not in stops, new_ids)
            texts.append(continuation_text(tokenizer, prompt, [*answer]))
    finally:
        engine.free_gathered_weights()
        model.train(was_training)
    return texts


def _generate(engine: Engine, ids: list[int], sampling: Sampling, number: int) -> list[int]:
    """Return the ``sampling.max_new_tokens`` tokens that follow prompt ``number``, ``ids``."""
    model = engine.unwrapped
    max_positions = _max_positions(model)
    generator = sampling.generator(number)
    new_ids: list[int] = []
    # All ranks make the same number of passes, because they communicate in each.
    for _ in range(sampling.max_new_tokens):
        visible = [*ids, *new_ids][-max_positions:]
        output = model(input_ids=torch.tensor([visible], device=engine.device))
        logits = getattr(output, "logits", output)[0, -1].float().cpu()
        new_ids.append(sample_token(logits, sampling, generator))
    return new_ids


def _max_positions(model: Any) -> int:
    """Return the length of a model's context, from its config; without one, no limit."""
    config: Any = getattr(model, "config", None)
    for name in ("block_size", "max_position_embeddings"):
        positions: int | None = getattr(config, name, None)
        if positions:
            return positions
    return 2**31
