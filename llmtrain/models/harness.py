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
from llmtrain.errors import UserError, explained, hub_said
from llmtrain.models.generation import TextModel
from llmtrain.models.lora import is_adapter
from llmtrain.parallel.ranks import Ranks
from llmtrain.types import Facts

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
        ranks = Ranks(accelerator)
        self.accelerator = accelerator
        self._device = ranks.device
        self._rank = ranks.rank
        self._world_size = ranks.world_size

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
    """Evaluate a model on tasks of the harness.

    Args:
        accelerator: Knows the ranks, the device and the precision.
        name: The folder of a model or of an adapter, or a hub name.
        tasks: Names of tasks, groups or tags; ``*`` matches any characters.
        include: A folder with further tasks, in YAML.
        batch_size: The number of questions that each rank answers at a time.
        answers: Where each rank keeps its answers, so that an interrupted evaluation can go on. :func:`forget` removes
            them.
        options: Further arguments of ``lm_eval.simple_evaluate``.

    Returns:
        One entry for each metric of each task, on rank 0. An empty list on the other ranks.

    Raises:
        UserError: If the harness does not have a task, or cannot load or run one.
    """
    cuts = _Cuts()
    log = logging.getLogger("lm_eval")
    log.addHandler(cuts)
    log.propagate = False

    manager = TaskManager(include_path=include)
    for task in tasks:
        if not manager.match_tasks([task]):
            guess = did_you_mean(task, manager.all_tasks)
            raise UserError(
                f"--tasks: the harness has no '{task}' (lm-eval ls tasks prints all){guess}"
            )
    limit = cast("int | None", options.get("limit"))
    processes = Ranks(accelerator).world_size
    if limit and limit < processes:
        raise UserError(
            f"--limit {limit} is less than the number of processes, {processes}; raise it."
        )

    try:
        model = _OnAllRanks(name, accelerator, batch_size)
        results: Facts | None = simple_evaluate(
            model,
            tasks=sorted(manager.match_tasks([*tasks])),
            task_manager=manager,
            batch_size=batch_size,
            use_cache=str(answers),
            log_samples=False,
            **options,
        )
    except UserError:
        raise
    except Exception as error:  # of the harness, datasets, the hub or a template
        reason = explained(error) or f"--tasks {' '.join(tasks)}: {hub_said(error)}"
        raise UserError(reason) from error

    cut = int(accelerator.reduce(torch.tensor(cuts.count, device=accelerator.device)))
    if cut:
        say(
            "cut",
            f"{cut:,} prompts are longer than the model's {model.max_length:,} positions, and lose their beginning",
        )
    return [] if results is None else [*_lines(results)]


def forget(accelerator: Accelerator, answers: Path) -> None:
    """Remove the answers that ranks have kept, when all are done with them."""
    accelerator.wait_for_everyone()
    Path(f"{answers}_rank{Ranks(accelerator).rank}.db").unlink(missing_ok=True)


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
