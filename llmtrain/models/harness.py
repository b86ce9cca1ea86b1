"""Scores on tasks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), of one model on all ranks."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from llmtrain.config import did_you_mean, require
from llmtrain.contract import Facts
from llmtrain.errors import UserError, hub_said
from llmtrain.models.generation import TextModel

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class _OnAllRanks(HFLM):  # type: ignore[misc]
    """A model that each rank holds whole, and asks its share of the questions."""

    def __init__(self, model: TextModel, accelerator: Accelerator, batch_size: int) -> None:
        dtype = _DTYPES.get(accelerator.mixed_precision)
        super().__init__(model.model, tokenizer=model.tokenizer, batch_size=batch_size, mixed_precision_dtype=dtype)
        self.accelerator, self._device = accelerator, accelerator.device
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes


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
        tasks: Names of tasks, groups or tags.
        include: A folder with tasks of one's own, in YAML.
        batch_size: Questions at a time on each rank.
        answers: Where each rank keeps answers until all are there, so that an interrupted evaluation goes on.
        options: Further arguments of ``lm_eval.simple_evaluate``.

    Raises :class:`UserError` for a task that the harness does not have, and where one cannot be loaded or asked.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = TaskManager(include_path=include, include_defaults=include is None)
    if not all(known.match_tasks([task]) for task in tasks):
        known = TaskManager(include_path=include)  # of the thousands that it brings, which take seconds
    for task in tasks:
        if not known.match_tasks([task]):
            guess = did_you_mean(task, known.all_tasks)
            raise UserError(f"--tasks: the harness has no '{task}' (lm-eval ls tasks prints all){guess}")
    least = accelerator.num_processes
    require((options.get("limit") or least) >= least, f"--limit: {least} ranks need a question each.")
    kept = f"{answers}-{accelerator.mixed_precision}"
    try:
        asked = _OnAllRanks(TextModel(name), accelerator, batch_size)
        found: Facts | None = simple_evaluate(
            asked,
            tasks=[*tasks],
            task_manager=known,
            batch_size=batch_size,
            use_cache=kept,
            log_samples=False,
            **options,
        )
    except UserError:
        raise
    except Exception as error:  # of the harness, datasets, the hub, a template
        raise UserError(f"--tasks {' '.join(tasks)}: {hub_said(error)}") from None
    Path(f"{kept}_rank{asked.rank}.db").unlink(missing_ok=True)
    return [] if found is None else [*_lines(found)]


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
