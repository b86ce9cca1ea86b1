"""Scores on tasks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), of one model on all ranks."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from llmtrain.config import did_you_mean
from llmtrain.console import say
from llmtrain.contract import Facts
from llmtrain.errors import UserError, explained, hub_said, require
from llmtrain.models.generation import TextModel
from llmtrain.models.lora import is_adapter

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class _OnAllRanks(HFLM):  # type: ignore[misc]
    """A model that each rank holds whole, and asks its share of the questions."""

    def __init__(self, name: str, accelerator: Accelerator, batch_size: int) -> None:
        text = TextModel(name)
        # merged, because peft's wrappers of tied embeddings cannot be tied again, which is done here
        model: Any = text.model
        super().__init__(
            (model.merge_and_unload() if is_adapter(Path(name)) else model).to(accelerator.device),
            tokenizer=text.tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=_DTYPES.get(accelerator.mixed_precision),
            softmax_dtype="float32",  # sums in 16 bits would make answers equally likely
        )
        self.accelerator, self._device = accelerator, accelerator.device
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts.

        Ranks do not wait for each other, as those of a sharded model must: one that has kept its answers is not here.
        """
        size, self._world_size = self._world_size, 1
        try:
            return cast(list[float], super().loglikelihood_rolling(requests, disable_tqdm))
        finally:
            self._world_size = size


class _Cuts(logging.Handler):
    """Counts the prompts that the harness cuts, which it warns of one by one."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record if it tells of one."""
        self.count += "runcat" in record.getMessage()


def scores(
    accelerator: Accelerator,
    name: str,
    tasks: Sequence[str],
    include: str | None,
    batch_size: int,
    answers: Path,
    **options: object,
) -> list[Facts]:
    """Return a line for each metric of each task; nothing on ranks other than the first.

    Args:
        accelerator: Knows the ranks, and the precision of products.
        name: A model's folder, an adapter's, or a hub name.
        tasks: Names of tasks, groups or tags; ``*`` stands for any letters.
        include: A folder with tasks of one's own, in YAML.
        batch_size: Questions at a time on each rank.
        answers: Where each rank keeps answers, so that an interrupted evaluation goes on; :func:`forget` ends that.
        options: Further arguments of ``lm_eval.simple_evaluate``.

    Raises :class:`UserError` for a task that the harness does not have, and where one cannot be loaded or asked.
    """
    cuts, log = _Cuts(), logging.getLogger("lm_eval")
    log.addHandler(cuts)
    log.propagate = False
    known, ranks = TaskManager(include_path=include), accelerator.num_processes
    for task in tasks:
        if not known.match_tasks([task]):
            guess = did_you_mean(task, known.all_tasks)
            raise UserError(
                f"--tasks: the harness has no '{task}' (lm-eval ls tasks prints all){guess}"
            )
    require(
        (options.get("limit") or ranks) >= ranks,
        f"--limit must be at least the number of ranks, {ranks}.",
    )
    try:
        asked = _OnAllRanks(name, accelerator, batch_size)
        found: Facts | None = simple_evaluate(
            asked,
            tasks=sorted(known.match_tasks([*tasks])),
            task_manager=known,
            batch_size=batch_size,
            use_cache=str(answers),
            log_samples=False,
            **options,
        )
    except UserError:
        raise
    except Exception as error:  # of the harness, datasets, the hub, a template
        raise UserError(
            explained(error) or f"--tasks {' '.join(tasks)}: {hub_said(error)}"
        ) from error
    cut = int(accelerator.reduce(torch.tensor(cuts.count, device=accelerator.device)))
    if cut:
        longer = f"{cut:,} prompts are longer than the model's {asked.max_length:,} positions"
        say("cut", f"{longer}, and lose their beginning")
    return [] if found is None else [*_lines(found)]


def forget(accelerator: Accelerator, answers: Path) -> None:
    """Remove the answers that ranks have kept, when all are done with them."""
    accelerator.wait_for_everyone()
    Path(f"{answers}_rank{accelerator.process_index}.db").unlink(missing_ok=True)


def _lines(found: Facts) -> Iterator[Facts]:
    """Yield the metrics of what the harness returns, which names them such as ``acc,none``: metric and filter."""
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{how}")
            yield {
                "task": task,
                "metric": metric if how == "none" else key,
                "value": value,
                "stderr": error if isinstance(error, float) else None,
                "questions": values.get("sample_len"),
                "num_fewshot": found["n-shot"].get(task),
            }
