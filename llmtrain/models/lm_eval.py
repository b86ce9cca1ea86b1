"""Evaluate a model on tasks of lm-evaluation-harness, on all ranks.

The harness is github.com/EleutherAI/lm-evaluation-harness.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval import evaluator, simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from llmtrain.config import did_you_mean
from llmtrain.console import pluralize, say
from llmtrain.errors import EVAL_MEMORY_REMEDY, UserError, explain, hub_error
from llmtrain.model_folders import is_adapter
from llmtrain.models.generation import TextModel
from llmtrain.parallel.ranks import Ranks
from llmtrain.types import JsonObject

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class _ReplicatedModel(HFLM):  # type: ignore[misc]
    """A model for the harness. Each rank holds all of it, and answers its share of the questions.

    Args:
        name: the folder of a model or of an adapter, or a hub name.
        ranks: the ranks that share the work.
        batch_size: the number of questions that each rank answers at a time.
    """

    def __init__(self, name: str, ranks: Ranks, batch_size: int) -> None:
        text_model = TextModel(name)
        model: Any = text_model.model
        if is_adapter(Path(name)):
            # HFLM ties the embeddings again, which fails with peft's wrappers.
            model = model.merge_and_unload()

        super().__init__(
            model.to(ranks.device),
            tokenizer=text_model.tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=_DTYPES.get(ranks.accelerator.mixed_precision),
            softmax_dtype="float32",  # sums in 16 bits would make answers equally likely
        )
        self.accelerator = ranks.accelerator
        self._device = ranks.device
        self._rank = ranks.rank
        self._world_size = ranks.world_size

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of texts.

        With several ranks, HFLM waits for all of them, as a sharded model needs. But a rank that
        has its answers in the cache does not call this. So every rank computes as if it were the
        only one.
        """
        world_size = self._world_size
        self._world_size = 1
        try:
            return cast(list[float], super().loglikelihood_rolling(requests, disable_tqdm))
        finally:
            self._world_size = world_size


class _TruncationCounter(logging.Handler):
    """Counts the prompts that the harness truncates. It logs a warning for each."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record if it is a warning about a truncated prompt."""
        if "runcat" in record.getMessage():  # in "Truncating" or "truncated"
            self.count += 1


def evaluate_tasks(
    ranks: Ranks,
    name: str,
    tasks: Sequence[str],
    include_path: str | None,
    batch_size: int,
    answers: Path,
    **options: object,
) -> list[JsonObject]:
    """Evaluate a model on tasks of the harness.

    Args:
        ranks: the ranks that share the work.
        name: the folder of a model or of an adapter, or a hub name.
        tasks: names of tasks, groups or tags. ``*`` matches any characters.
        include_path: a folder with further tasks, in YAML.
        batch_size: the number of questions that each rank answers at a time.
        answers: where each rank keeps its answers, so that an interrupted evaluation can continue.
            :func:`remove_answers` removes them.
        options: further arguments of ``lm_eval.simple_evaluate``.

    Returns:
        An entry for each metric of each task, on rank 0. An empty list on the other ranks.

    Raises:
        UserError: if the harness does not have a task, or cannot load or run one.
    """
    truncations = _TruncationCounter()
    log = logging.getLogger("lm_eval")
    log.addHandler(truncations)
    log.propagate = False

    manager = TaskManager(include_path=include_path)
    _check_tasks(manager, tasks)
    limit = cast("int | None", options.get("limit"))
    processes = ranks.world_size
    if limit and limit < processes:
        raise UserError(
            f"--limit {limit} is less than the number of processes, {processes}; raise it."
        )

    # The harness records the commit of the current folder. In a folder that is no repository, git
    # would print an error, and the commit is not used.
    evaluator.get_git_commit_hash = lambda: None
    try:
        model = _ReplicatedModel(name, ranks, batch_size)
        results: JsonObject | None = simple_evaluate(
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
    except Exception as error:
        # The harness, a dataset, the hub or a chat template may fail.
        reason = explain(error, EVAL_MEMORY_REMEDY)
        if reason is None:
            reason = f"--tasks {' '.join(tasks)}: {hub_error(error)}"
        raise UserError(reason) from error

    truncated = torch.tensor(truncations.count, device=ranks.device)
    truncated_everywhere = int(ranks.sum_over_ranks(truncated))
    if truncated_everywhere:
        say(
            "truncated",
            f"{pluralize(truncated_everywhere, 'prompt')} at the beginning, to fit the model's "
            f"{model.max_length:,} positions",
        )
    return [] if results is None else list(_entries(results))


def _check_tasks(manager: TaskManager, tasks: Sequence[str]) -> None:
    """Raise :class:`UserError` if the harness does not have one of the tasks."""
    for task in tasks:
        if not manager.match_tasks([task]):
            suggestion = did_you_mean(task, manager.all_tasks)
            raise UserError(
                f"--tasks: the harness has no '{task}' (lm-eval ls tasks prints all){suggestion}"
            )


def remove_answers(ranks: Ranks, answers: Path) -> None:
    """Remove the answers that all ranks have kept, once no rank needs them any more."""
    ranks.accelerator.wait_for_everyone()
    Path(f"{answers}_rank{ranks.rank}.db").unlink(missing_ok=True)


def _entries(results: JsonObject) -> Iterator[JsonObject]:
    """Yield an entry for each metric in the results of the harness.

    The harness names a metric together with its filter, such as ``acc,none``.
    """
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            yield {
                "task": task,
                "metric": metric if filter_name == "none" else key,
                "value": value,
                "stderr": stderr if isinstance(stderr, float) else None,
                "questions": values.get("sample_len"),
                "num_fewshot": results["n-shot"].get(task),
            }
