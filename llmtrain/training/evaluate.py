"""What a model can do now: its eval loss, the losses of single rows, and samples of its text."""

import bisect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from llmtrain.errors import UserError
from llmtrain.models.generation import Sampling, draw
from llmtrain.parallel.engine import Engine, add_metrics
from llmtrain.types import Batch, Facts, LocalBatch, LossSums, Metric, StepTotals

_ROW_TOKENS = 64  # tokens of a row that `row_losses` returns
_LOSS = ""  # the name under which the loss is summed; it sorts before all others


class EvalSums:
    """Sums over eval batches: ratios by name, and the sums of the objective's further metrics.

    They stay on the device until they are reduced, because reading each would wait for it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # MPS has no float64.
        on_mps = engine.device.type == "mps"
        self.device = torch.device("cpu") if on_mps else engine.device
        self._ratios: dict[str, torch.Tensor] = {}  # float64 [2]: numerator and denominator
        self._metrics: dict[str, torch.Tensor] = {}

    def add(
        self,
        ratios: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        metrics: dict[str, torch.Tensor],
    ) -> None:
        """Add the sums of a micro-batch.

        Args:
            ratios: by name, a sum and what it is divided by.
            metrics: further sums.

        Raises:
            UserError: the names differ from those of earlier micro-batches.
        """
        if self._ratios and self._ratios.keys() != ratios.keys():
            raise UserError(
                "a metric must have the same names for every batch, "
                f"not {sorted(self._ratios)} and {sorted(ratios)}."
            )
        for name, ratio in ratios.items():
            numbers = [
                torch.as_tensor(number, dtype=torch.float64, device=self.device) for number in ratio
            ]
            pair = torch.stack(numbers)
            self._ratios[name] = self._ratios[name] + pair if name in self._ratios else pair
        add_metrics(self._metrics, metrics)

    def reduce(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Return ratios and further sums over all ranks; all ranks call this."""
        names = sorted(self._ratios)
        parts = [self._ratios[name] for name in names]
        if self._metrics:
            metrics = torch.stack([*self._metrics.values()])
            parts.append(metrics.to(self.device, torch.float64))
        total = torch.cat(parts)
        if self.engine.world_size > 1:
            total = self.engine.sum_over_ranks(total)

        numbers = total.tolist()
        ratios = {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}
        metric_sums = dict(zip(self._metrics, numbers[2 * len(names) :], strict=True))
        return ratios, metric_sums


def mean(ratio: tuple[float, float]) -> float:
    """Return a sum divided by its denominator; 0 if nothing was counted."""
    total, count = ratio
    return total / (count or 1)


@torch.no_grad()
def evaluate(
    engine: Engine,
    eval_batches: Iterable[LocalBatch],
    text_bytes: int,
    metric: Metric | None = None,
    sources: Mapping[str, int] | None = None,
    extra: Batch | None = None,
) -> dict[str, float]:
    """Return the eval loss over all ranks, and the metrics that follow from it.

    Every target token counts once, whatever the parallel layout.

    Args:
        engine: how this process computes.
        eval_batches: this rank's share of the eval rows.
        text_bytes: UTF-8 bytes of the eval text.
        metric: a metric of the user's own. ``eval/NAME`` is the sum that it returns for a name,
            divided by its denominator, each summed over all micro-batches.
        sources: the number of rows of each source, in the order of the rows. ``eval/loss/SOURCE`` is
            the loss of one source. No batch has rows of two sources.
        extra: what the objective's ``prepass`` returned for all eval rows.

    Raises:
        UserError: the names of a metric differ between micro-batches.
    """
    source_rows = sources or {}
    sums = EvalSums(engine)
    engine.model.eval()
    for local_batch in eval_batches:
        source = _source_of(local_batch, source_rows)
        for batch in local_batch.batches:
            own_ratios = metric(engine.unwrapped, batch) if metric is not None else {}
            loss = engine.loss(batch, extra)
            count = engine.objective.denominator(batch)
            ratios = _loss_by_source(loss, count, source, source_rows)
            sums.add(ratios | own_ratios, loss.metrics)
    engine.free_gathered_weights()
    engine.model.train()

    totals, metric_sums = sums.reduce()
    loss_sum, denominator = totals.pop(_LOSS)
    mean_loss = loss_sum / max(denominator, 1)
    metrics = {
        **engine.objective.eval_metrics(loss_sum, mean_loss, text_bytes),
        **engine.objective.metrics(metric_sums, extra={}),
        **{name: mean(ratio) for name, ratio in totals.items()},
    }
    return {"eval/loss": mean_loss, **{f"eval/{name}": value for name, value in metrics.items()}}


def _loss_by_source(
    loss: LossSums, count: torch.Tensor, source: str | None, source_rows: Mapping[str, int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the loss of a micro-batch and its denominator: of all, and of each source."""
    nothing = (count.new_zeros(()), count.new_zeros(()))
    ratios = {_LOSS: (loss.loss, count)}
    for name in source_rows:
        ratios[f"loss/{name}"] = (loss.loss, count) if name == source else nothing
    return ratios


def _source_of(local_batch: LocalBatch, source_rows: Mapping[str, int]) -> str | None:
    """Return the source that the rows of a batch are from; ``None`` if there are no sources."""
    if not source_rows:
        return None
    ends = list(itertools.accumulate(source_rows.values()))
    last_row = int(local_batch.rows.max())
    return list(source_rows)[bisect.bisect_right(ends, last_row)]


def eval_extra(engine: Engine, eval_batches: Iterable[LocalBatch]) -> Batch:
    """Return the extra inputs that the objective needs for an eval loss; that may take a pass."""
    if not engine.objective.uses_prepass_in_eval:
        return {}
    engine.model.eval()
    batches = (batch for local_batch in eval_batches for batch in local_batch.batches)
    nothing = torch.zeros((), device=engine.device)
    totals = StepTotals(target_tokens=nothing, denominator=nothing, stop_votes=nothing)
    return engine.objective.prepass(engine, batches, totals)


@torch.no_grad()
def row_losses(engine: Engine, local_batch: LocalBatch) -> list[Facts]:
    """Return each row of the global batch with its loss, before the step is made.

    All ranks call this. It draws no random numbers that the step would have drawn.

    Returns:
        A dictionary for each row: ``row``, ``targets`` (the number of target tokens), ``loss``
        (their mean in nats, or the mean over what the objective counts) and ``tokens`` (the first).
    """
    extra: Batch = {}
    if engine.objective.uses_prepass_in_eval:
        totals = engine.count(local_batch.batches)
        extra = engine.objective.prepass(engine, local_batch.batches, totals)

    rows = [
        {name: column[i : i + 1] for name, column in local_batch.columns.items()}
        for i in range(len(local_batch.rows))
    ]
    with engine.fork_rng():
        losses = [engine.loss(row, extra).loss.float().reshape(()) for row in rows]
    counts = [engine.objective.denominator(row) for row in rows]

    first_tokens = local_batch.columns["input_ids"][:, :_ROW_TOKENS].contiguous()
    columns = (
        local_batch.rows,
        local_batch.targets,
        torch.stack(counts),
        torch.stack(losses),
        first_tokens,
    )
    of_all_ranks = [engine.gather_rows(column).tolist() for column in columns]
    return [
        {"row": row, "targets": targets, "loss": loss / max(count, 1), "tokens": tokens}
        for row, targets, count, loss, tokens in zip(*of_all_ranks, strict=True)
        if row >= 0
    ]


@torch.no_grad()
def sample(engine: Engine, tokenizer: Any, prompts: list[str], sampling: Sampling) -> list[str]:
    """Generate a continuation of each prompt, or an answer if there is a chat template.

    All ranks call this and compute the same, because none may hold the full model. Torch's own
    generators stay as they are.
    """
    model = engine.unwrapped
    was_training = model.training
    model.eval()
    texts = []
    for prompt in prompts:
        ids = _ids_of(tokenizer, prompt)
        texts.append(_continued(engine, tokenizer, ids, sampling))
    engine.free_gathered_weights()
    model.train(was_training)
    return texts


def _ids_of(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt; at least one, to begin with."""
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if ids:
        return ids
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return [tokenizer.eos_token_id]


def _continued(engine: Engine, tokenizer: Any, ids: list[int], sampling: Sampling) -> str:
    """Return the text that follows the tokens ``ids``, up to the end token."""
    model = engine.unwrapped
    most_positions = _most_positions(model)
    generator = torch.Generator().manual_seed(sampling.seed)
    new_ids: list[int] = []
    # All ranks make the same number of passes, because they communicate in each.
    for _ in range(sampling.max_new_tokens):
        visible = [*ids, *new_ids][-most_positions:]
        output = model(input_ids=torch.tensor([visible], device=engine.device))
        logits = getattr(output, "logits", output)[0, -1].float().cpu()
        new_ids.append(draw(logits, sampling, generator))

    if tokenizer.eos_token_id in new_ids:
        new_ids = new_ids[: new_ids.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(new_ids, skip_special_tokens=True))


def _most_positions(model: Any) -> int:
    """Return the number of positions that a model can see, as its configuration has it."""
    config: Any = getattr(model, "config", None)
    for name in ("block_size", "max_position_embeddings"):
        positions: int | None = getattr(config, name, None)
        if positions:
            return positions
    return 2**31
