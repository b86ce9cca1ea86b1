"""Arithmetic of a pipeline under 1F1B (Narayanan et al. 2019, arXiv:1806.03377).

A stage computes the backward pass of a micro-batch as soon as it can. It has begun no more of them than there are
stages from it to the last, and waits for each of the others once while the pipeline fills and empties.
"""

from llmtrain.parallel.mesh import Sharding
from llmtrain.parallel.stages import Staged
from llmtrain.plan.subject import Subject

_NUMBER_BYTES = 4  # hidden states go from stage to stage in float32


def passed_bytes(subject: Subject, rows: int) -> int:
    """Return the bytes of a micro-batch that one stage passes on to the next."""
    return rows * subject.positions * subject.width * _NUMBER_BYTES


def waits(
    seconds_to_pass: float, sharding: Sharding, accumulation: int, seconds_of_stage: float
) -> tuple[float, float]:
    """Return the seconds of a step that a stage sends, and that it waits.

    Args:
        seconds_to_pass: to send what a stage passes on of a micro-batch.
        sharding: how many stages there are.
        accumulation: micro-batches of a step.
        seconds_of_stage: a stage's forward and backward pass of a micro-batch.
    """
    sent = 2 * accumulation * seconds_to_pass
    idle = (sharding.stages - 1) * (seconds_of_stage + 2 * seconds_to_pass)
    return sent, idle + sent


def stages_for(
    subject: Subject, processes: int, most_stages: int, wanted: int | None
) -> Sharding | None:
    """Return the sharding into stages; ``None`` if the model cannot be split.

    Args:
        subject: the model.
        processes: the number of processes.
        most_stages: the largest number of stages, if the user has asked for none.
        wanted: the number of stages that the user has asked for.
    """
    if not isinstance(subject.model, Staged):
        return None
    stages = wanted or subject.settings.parallel.pipeline_stages
    if stages == 1:
        limit = min(subject.blocks, most_stages)
        stages = max(count for count in range(1, limit + 1) if processes % count == 0)
    if stages == 1:
        return None
    return Sharding(replicas=processes // stages, shards=1, stages=stages)
