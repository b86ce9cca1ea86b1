"""The seconds and bytes of a pipeline under 1F1B.

1F1B is the schedule of Narayanan et al. 2019, DOI 10.1145/3341301.3359646. A stage computes the
backward pass of a micro-batch as soon as it can. It has begun no more micro-batches than there are
stages from it to the last. While the pipeline fills and empties, it waits for each of the other
stages once.
"""

from typing import NamedTuple

from llmtrain.parallel.mesh import Sharding
from llmtrain.parallel.stages import Staged
from llmtrain.plan.subject import Subject

_FLOAT32_BYTES = 4  # hidden states go from stage to stage in float32


class StageSeconds(NamedTuple):
    """Seconds of a step in which a stage does not compute.

    Attributes:
        sending: it sends to its neighbours.
        exposed: it sends, or waits for other stages.
    """

    sending: float
    exposed: float


def bytes_between_stages(subject: Subject, rows: int) -> int:
    """Return the bytes of a micro-batch that one stage passes on to the next."""
    return rows * subject.positions * subject.width * _FLOAT32_BYTES


def stage_seconds(
    sharding: Sharding, accumulation: int, *, seconds_to_pass: float, seconds_to_compute: float
) -> StageSeconds:
    """Return the seconds of a step in which a stage does not compute.

    Args:
        sharding: how many stages there are.
        accumulation: micro-batches per step.
        seconds_to_pass: to send a micro-batch's hidden states from one stage to the next.
        seconds_to_compute: a stage's forward and backward pass of a micro-batch.
    """
    sending = 2 * accumulation * seconds_to_pass
    waiting = (sharding.stages - 1) * (seconds_to_compute + 2 * seconds_to_pass)
    return StageSeconds(sending=sending, exposed=waiting + sending)


def sharding_into_stages(
    subject: Subject, processes: int, *, most_stages: int, requested_stages: int | None
) -> Sharding | None:
    """Return the sharding into stages, or ``None`` if the model cannot be split.

    Args:
        subject: the model.
        processes: the number of processes.
        most_stages: the largest number of stages, if the user has not requested a number.
        requested_stages: the number of stages that the user has requested.
    """
    if not isinstance(subject.model, Staged):
        return None

    stages = requested_stages or subject.settings.parallel.pipeline_stages
    if stages == 1:
        limit = min(subject.blocks, most_stages)
        stages = max(count for count in range(1, limit + 1) if processes % count == 0)
    if stages == 1:
        return None
    return Sharding(replicas=processes // stages, shards=1, stages=stages)
