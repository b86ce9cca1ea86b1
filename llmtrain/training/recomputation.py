"""How many blocks must compute their activations again, so that a run fits into memory."""

from llmtrain.interfaces.model_bundle import Recomputation, can_recompute
from llmtrain.parallel.ranks import Sharding
from llmtrain.quantities import size_text
from llmtrain.training.predicted_memory import Memory


def least_recomputation(
    memory: Memory,
    sharding: Sharding,
    *,
    rows: int,
    accumulation: int,
    device_bytes: float,
) -> Recomputation:
    """Return the fewest blocks to recompute so that a run fits.

    If it does not fit in any case, all blocks are computed again.

    Args:
        memory: the memory that the model needs.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
        device_bytes: memory of the device.

    Raises:
        UserError: if the activations depend on the values of tensors.
    """
    without = memory.bytes_of(sharding, rows, accumulation, every=0).total
    limit = size_text(device_bytes)
    if without <= device_bytes:
        return Recomputation(0, f"no block: the run needs {size_text(without)} of {limit}")
    if not can_recompute(memory.recipe.model):
        return Recomputation(
            0,
            f"no block, although the run needs {size_text(without)} of {limit}: "
            f"{memory.recipe.class_name} cannot compute activations again",
        )

    blocks = memory.activations(rows, sharding.is_sharded, every=0).blocks
    for recomputed in range(1, blocks + 1):
        # The smallest `every` that leaves so many: a larger one may recompute the last block, too,
        # for which more memory is needed.
        every = -(-blocks // recomputed)
        needed = memory.bytes_of(sharding, rows, accumulation, every).total
        if needed <= device_bytes:
            break

    recomputed = -(-blocks // every)
    which = "all blocks" if every == 1 else f"{recomputed} of {blocks} blocks"
    reason = f"the run needs {size_text(needed)} of {limit}, and {size_text(without)} without"
    if needed > device_bytes:
        reason = f"{reason}, so it may run out of memory"
    return Recomputation(every, f"{which}: {reason}")


def recomputed_share(blocks: int, every: int) -> float:
    """Return the share of all blocks that is computed again, if one of ``every`` blocks is."""
    if every == 0:
        return 0.0
    return -(-blocks // every) / blocks
