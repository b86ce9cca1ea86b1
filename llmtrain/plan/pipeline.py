"""Arithmetic of a pipeline under 1F1B (Narayanan et al. 2019, arXiv:1806.03377).

A stage computes the backward pass of a micro-batch as soon as it can. It has begun no more of them than there are
stages from it to the last, and waits for each of the others once while the pipeline fills and empties.
"""

from typing import TYPE_CHECKING

from llmtrain.parallel.mesh import Sharding, Staged, holders_of
from llmtrain.plan.activations import Kept, list_of_blocks

if TYPE_CHECKING:
    from llmtrain.plan.memory import Bytes, Memory
    from llmtrain.plan.speed import Cluster

_NUMBER = 4  # bytes: hidden states go from stage to stage in float32


def stage_of(
    memory: "Memory", kept: Kept, sharding: Sharding, stage: int, rows: int, accumulation: int
) -> "Bytes":
    """Return the bytes of one stage."""
    model, last = memory.subject.model, sharding.stages - 1
    here = {name for name, stages in holders_of(model, sharding.stages).items() if stage in stages}
    first = {next(block.parameters()) for block in list_of_blocks(model) or ()}
    blocks = sum(parameter in first for name, parameter in model.named_parameters() if name in here)
    more, logits = kept.peak
    at_work = more - kept.before - kept.block * kept.blocks  # beyond what is kept for backward
    waiting = min(sharding.stages - stage, accumulation)
    activations = (
        waiting * (kept.block * blocks + (_passed(memory, rows) if stage else kept.before))
        + at_work
    )
    at_loss = activations, logits if stage == last else 0.0
    if (
        waiting == accumulation
    ):  # at its fullest before its first backward pass: no gradient is there
        accumulation = 1
    parts = [part for part in memory.parts(1) if part.name in here]
    return memory.fullest(parts, sharding, accumulation, kept, at_loss, activations)


def waits(
    memory: "Memory",
    cluster: "Cluster",
    sharding: Sharding,
    rows: int,
    accumulation: int,
    work: float,
) -> tuple[float, float]:
    """Return seconds of sending in an update, and of waiting: for each of the other stages, and for what is passed on.

    ``work`` is the time of a stage's forward and backward pass of a micro-batch.
    """
    one = cluster.send(_passed(memory, rows), sharding.tensor)
    sent = 2 * accumulation * one
    return sent, (sharding.stages - 1) * (work + 2 * one) + sent


def stages_for(
    memory: "Memory", processes: int, at_most: int, asked: int | None
) -> Sharding | None:
    """Return the sharding into stages, as many as were asked for; ``None`` where the model has no stages.

    Where nobody asked, they are as many as its blocks and ``at_most`` allow.
    """
    if not isinstance(memory.subject.model, Staged):
        return None
    stages = asked or memory.subject.settings.parallel.pipeline_stages
    if stages == 1:
        stages = max(
            n for n in range(1, min(memory.subject.blocks, at_most) + 1) if processes % n == 0
        )
    return Sharding(processes // stages, 1, stages=stages) if stages > 1 else None


def _passed(memory: "Memory", rows: int) -> int:
    """Bytes that a stage passes on of a micro-batch."""
    return rows * memory.subject.positions * memory.subject.width * _NUMBER
