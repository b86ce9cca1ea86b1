"""Measure a model between steps: its eval loss, and text samples."""

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.part import Metric, name_of
from llmtrain.models.generation import Sampling, continuation_text, sample_token
from llmtrain.parallel.engine import Engine, check_denominator, check_metrics, is_scalar
from llmtrain.parallel.shards import reshard

# A value that is summed over the micro-batches: its kind and its name. "sum" and "count" are the
# two parts of a ratio, and "own" is a further metric of the objective.
_Key: TypeAlias = tuple[Literal["sum", "count", "own"], str]
_Totals: TypeAlias = dict[_Key, float]


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[LocalBatch],
    text_bytes: int,
    metrics: Sequence[Metric] = (),
    sources: Iterable[str] = (),
) -> dict[str, float]:
    """Return the eval loss over all ranks, and further metrics by name.

    Every target token counts once, or with its weight, whatever the parallel layout.

    Args:
        engine: how this process computes.
        batches: this rank's share of the eval rows. They may be read twice.
        text_bytes: UTF-8 bytes of the eval text; 0 if the rows are no text.
        metrics: metrics of the user.
        sources: the names of the sources, by their numbers. ``loss/SOURCE`` is the loss of one
            source. No batch has rows of two sources.

    Raises:
        UserError: if two metrics have the same name, or if the names differ between micro-batches.
    """
    objective = engine.objective
    engine.model.eval()
    extra = _prepass(engine, batches)
    sums = _SourceSums(engine)
    for local_batch in _watched(engine, batches):
        for batch in local_batch.batches:
            ratios_of_user = _ratios_of_user(engine, metrics, batch)
            loss_sums = engine.loss(batch, extra)
            ratios = {"loss": (loss_sums.loss, engine.denominator(batch))}
            add_metrics(ratios, ratios_of_user)
            sums.add(local_batch.source, ratios, loss_sums.metrics)
            if "loss_weight" in batch:
                text_bytes = 0  # a weighted loss is not the information in a text
    reshard(engine.model)
    engine.model.train()

    totals_of_sources = sums.reduce()
    totals: _Totals = {}
    for totals_of_source in totals_of_sources.values():
        for key, value in totals_of_source.items():
            totals[key] = totals.get(key, 0.0) + value
    check_denominator(objective, totals["count", "loss"])
    loss = _mean(totals, "loss")
    own_sums = {name: value for (kind, name), value in totals.items() if kind == "own"}

    results = {"loss": loss}
    further = {
        "eval_metrics": objective.eval_metrics(totals["sum", "loss"], loss, text_bytes),
        "metrics": objective.metrics(own_sums, extra),
    }
    for method, values in further.items():
        add_metrics(results, as_numbers_by_name(f"{name_of(objective)}.{method}", values))
    for number, source in enumerate(sources):
        add_metrics(results, {f"loss/{source}": _mean(totals_of_sources[number], "loss")})
    names = [name for kind, name in totals if kind == "sum" and name != "loss"]
    add_metrics(results, {name: _mean(totals, name) for name in names})
    return results


def _watched(engine: Engine, batches: Iterable[LocalBatch]) -> Iterator[LocalBatch]:
    """Yield the batches. A long phase could be taken for a hang, so it begins again with each."""
    for batch in batches:
        engine.phases.begin("an evaluation")
        yield batch


def _prepass(engine: Engine, batches: Iterable[LocalBatch]) -> Batch:
    """Return the extra inputs that the objective needs for an eval loss.

    Objectives with ``uses_prepass_in_eval``, such as KTO for its baseline, make a pass over all
    eval batches for them, as if these were one global batch. Another pass counts their targets,
    without the model.
    """
    if not engine.objective.uses_prepass_in_eval:
        return {}

    def micro_batches() -> Iterator[Batch]:
        for local_batch in _watched(engine, batches):
            yield from local_batch.batches

    totals = engine.count(micro_batches())
    return engine.objective.prepass(engine, micro_batches(), totals)


class _SourceSums:
    """Sums of values over eval batches, by source.

    The values of the micro-batches stay on the device until :meth:`reduce`, because reading one
    waits for the device. Each source has its own sums, because its rows begin with a new batch.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # MPS has no float64.
        on_mps = engine.device.type == "mps"
        self.device = torch.device("cpu") if on_mps else engine.device
        self._keys: list[_Key] = []
        self._micro_batches: dict[int, list[torch.Tensor]] = {}  # float64 [keys], by source

    def add(
        self,
        source: int,
        ratios: Mapping[str, tuple[Any, Any]],
        own_sums: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the values of a micro-batch.

        Args:
            source: the number of the source of its rows.
            ratios: a sum and its denominator, by name.
            own_sums: sums of the objective's further metrics, by name.

        Raises:
            UserError: if the names differ from those of earlier micro-batches.
        """
        values: dict[_Key, Any] = {}
        for name in sorted(ratios):
            values["sum", name], values["count", name] = ratios[name]
        for name in sorted(own_sums):
            values["own", name] = own_sums[name]

        keys = [*values]
        if self._micro_batches and self._keys != keys:
            earlier_names, names = ({name for _, name in both} for both in (self._keys, keys))
            raise UserError(
                f"a metric must have the same names for every batch, not {sorted(earlier_names)} "
                f"and {sorted(names)}."
            )
        self._keys = keys
        numbers = [
            torch.as_tensor(value, dtype=torch.float64, device=self.device)
            for value in values.values()
        ]
        row = torch.stack(numbers)
        self._micro_batches.setdefault(source, []).append(row)

    def reduce(self) -> dict[int, _Totals]:
        """Return the sums of each source over all ranks; all ranks call this."""
        sums = [
            self.engine.sum_of_micro_batches(torch.stack(rows))
            for rows in self._micro_batches.values()
        ]
        numbers = torch.stack(sums).tolist()
        return {
            source: dict(zip(self._keys, row, strict=True))
            for source, row in zip(self._micro_batches, numbers, strict=True)
        }


def _mean(totals: _Totals, name: str) -> float:
    """Return a sum divided by its denominator; the sum itself if that is 0."""
    return totals["sum", name] / (totals["count", name] or 1)


def _ratios_of_user(
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
            is_value=lambda value: all(
                isinstance(part, Real) or is_scalar(part) for part in _as_ratio(value)
            ),
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
        if name in metrics:
            raise UserError(f"there are two metrics with the name {name}; rename one.")
        metrics[name] = value


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
        reshard(model)
        model.train(was_training)
    return texts


def _generate(engine: Engine, ids: list[int], sampling: Sampling, number: int) -> list[int]:
    """Return the ``sampling.max_new_tokens`` tokens that follow prompt ``number``, ``ids``."""
    model = engine.unwrapped
    config: Any = getattr(model, "config", None)
    max_positions: int | None = getattr(config, "block_size", None)
    if not max_positions:
        max_positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    generator = sampling.generator(number)
    new_ids: list[int] = []
    # All ranks make the same number of passes, because they communicate in each.
    for _ in range(sampling.max_new_tokens):
        visible = [*ids, *new_ids][-max_positions:]
        output = model(input_ids=torch.tensor([visible], device=engine.device))
        logits = getattr(output, "logits", output)[0, -1].float().cpu()
        new_ids.append(sample_token(logits, sampling, generator))
    return new_ids
