"""Whether blocks recompute their activations, so that a run fits into memory.

``--gradient_checkpointing auto`` decides it at each start of a run, whose weights do not depend on
it.
"""

import torch

from llmtrain.config.flags import value_of
from llmtrain.console import size_text
from llmtrain.data.tokenized import Tokenized
from llmtrain.devices import RESERVED_MEMORY
from llmtrain.errors import first_line
from llmtrain.interfaces.model import (
    ModelBundle,
    Recomputation,
    RecomputesBlocks,
    can_recompute,
)
from llmtrain.parallel.ranks import Ranks, Sharding
from llmtrain.training.layout import Layout
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import RecipeModel
from llmtrain.training.settings import Settings


def choose_recomputation(
    ranks: Ranks, bundle: ModelBundle, settings: Settings, layout: Layout, rows: Tokenized
) -> None:
    """Let all blocks recompute their activations if the GPUs have too little memory otherwise.

    All ranks call this, and decide the same. On a CPU, nothing is decided.

    Args:
        ranks: the ranks of the run.
        bundle: the model, on the meta device or not. Its ``recomputation`` is set.
        settings: the settings of the run.
        layout: its parallel layout.
        rows: the rows to train on.
    """
    flag = value_of(settings, "gradient_checkpointing", default=False)
    if flag is not None:  # the model was built accordingly
        bundle.recomputation = Recomputation(enabled=flag)
        return
    device_bytes = usable_bytes(ranks)
    if device_bytes is None or not isinstance(bundle.model, RecomputesBlocks):
        return

    if settings.parallel.bitwise:
        chosen = Recomputation(False, "no block, because of --bitwise")
    elif ranks.sharding.cpu_offload and can_recompute(bundle.model):
        chosen = Recomputation(True, "all blocks, because weights are offloaded")
    else:
        precision = ranks.accelerator.mixed_precision
        recipe = RecipeModel.of(bundle, settings, precision, rows)
        try:
            chosen = least_recomputation(
                Memory.of(recipe, on_gpu=ranks.device.type == "cuda"),
                ranks.sharding,
                rows=layout.micro_batch,
                accumulation=layout.accumulation,
                device_bytes=device_bytes,
            )
        except Exception as error:  # a model whose memory is unknown can be trained all the same
            chosen = Recomputation(
                False,
                f"no block, because the memory of the run is unknown ({first_line(error)}); if "
                "there is too little, add --gradient_checkpointing",
            )
    bundle.model.recompute_blocks(chosen.enabled)
    bundle.recomputation = chosen


def usable_bytes(ranks: Ranks) -> float | None:
    """Return the bytes that tensors can have on the smallest of all ranks' GPUs.

    It is ``None`` on a CPU. Other programs share its memory, so how much of it is free now says
    nothing about a later step.
    """
    if ranks.device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(ranks.device).total_memory
    return min(ranks.gather_numbers({"memory": total})["memory"]) * (1 - RESERVED_MEMORY)


def least_recomputation(
    memory: Memory,
    sharding: Sharding,
    *,
    rows: int,
    accumulation: int,
    device_bytes: float,
) -> Recomputation:
    """Return whether blocks have to be recomputed so that a run fits.

    Args:
        memory: the memory that the model needs.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
        device_bytes: memory of the device.

    Raises:
        UserError: if the activations depend on the values of tensors.
    """
    without = memory.bytes_of(sharding, rows, accumulation, recomputes=False).total
    limit = size_text(device_bytes)
    if without <= device_bytes:
        return Recomputation(False, f"no block: the run needs {size_text(without)} of {limit}")
    if not can_recompute(memory.recipe.model):
        return Recomputation(
            False,
            f"no block, although the run needs {size_text(without)} of {limit}: "
            f"{memory.recipe.class_name} cannot recompute activations",
        )

    needed = memory.bytes_of(sharding, rows, accumulation, recomputes=True).total
    reason = f"the run needs {size_text(needed)} of {limit}, and {size_text(without)} without"
    if needed > device_bytes:
        reason = f"{reason}, so it may run out of memory"
    return Recomputation(True, f"all blocks: {reason}")
