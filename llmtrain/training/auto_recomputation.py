"""Decide ``--gradient_checkpointing auto`` when a run starts, and keep the choice at a resume."""

import torch

from llmtrain.config.flags import value_of
from llmtrain.devices import RESERVED_MEMORY
from llmtrain.errors import first_line
from llmtrain.interfaces.model_bundle import (
    ModelBundle,
    Recomputation,
    RecomputesBlocks,
    can_recompute,
)
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.layout import Layout
from llmtrain.training.settings import Settings


def choose_recomputation(
    ranks: Ranks, bundle: ModelBundle, settings: Settings, layout: Layout, positions: int
) -> None:
    """Let as few blocks compute their activations again as the memory of the GPUs makes necessary.

    All ranks call this, and decide the same. On a CPU, nothing is decided.

    Args:
        ranks: the ranks of the run.
        bundle: the model, on the meta device or not. Its ``recomputation`` is set.
        settings: the settings of the run.
        layout: its parallel layout.
        positions: the positions of a row that a micro-batch computes.
    """
    flag = _flag_of(settings)
    if flag is not None:  # the model was built accordingly
        bundle.recomputation = Recomputation(every=int(flag))
        return
    device_bytes = usable_bytes(ranks)
    if device_bytes is None or not isinstance(bundle.model, RecomputesBlocks):
        return

    if settings.parallel.bitwise:
        chosen = Recomputation(0, "no block, because of --bitwise")
    elif ranks.sharding.cpu_offload and can_recompute(bundle.model):
        chosen = Recomputation(1, "all blocks, because weights are offloaded")
    else:
        chosen = _least_of_run(ranks, bundle, settings, layout, positions, device_bytes)
    bundle.model.recompute_blocks(chosen.every)
    bundle.recomputation = chosen


def _least_of_run(
    ranks: Ranks,
    bundle: ModelBundle,
    settings: Settings,
    layout: Layout,
    positions: int,
    device_bytes: float,
) -> Recomputation:
    """Return the fewest blocks that must compute their activations again, by the memory model."""
    # This imports much of transformers and takes a second, which a CPU need not wait for.
    from llmtrain.training.predicted_memory import Memory, RecipeModel
    from llmtrain.training.recomputation import least_recomputation

    recipe = RecipeModel(
        model=bundle.model,
        settings=settings,
        precision=ranks.accelerator.mixed_precision,
        positions=positions,
        objective=bundle.objective,
    )
    try:
        return least_recomputation(
            Memory.of(recipe, on_gpu=ranks.device.type == "cuda"),
            ranks.sharding,
            rows=layout.micro_batch,
            accumulation=layout.accumulation,
            device_bytes=device_bytes,
        )
    except Exception as error:  # a model whose memory is unknown can be trained all the same
        return Recomputation(
            0,
            f"no block, because the memory of the run is unknown ({first_line(error)}); if there "
            "is too little, add --gradient_checkpointing",
        )


def usable_bytes(ranks: Ranks) -> float | None:
    """Return the bytes that tensors can have on the smallest of all ranks' GPUs.

    It is ``None`` on a CPU. Other programs share its memory, so how much of it is free now says
    nothing about a later step.
    """
    if ranks.device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(ranks.device).total_memory
    return min(ranks.gather_numbers({"memory": total})["memory"]) * (1 - RESERVED_MEMORY)


def keep_recomputation(settings: Settings, bundle: ModelBundle, recorded: int | None) -> None:
    """Let a run that is resumed recompute the same blocks as before.

    Args:
        settings: the settings of the run.
        bundle: the model, with the choice for this start. Both are changed.
        recorded: ``Recomputation.every`` of an earlier start; ``None`` if it is unknown.
    """
    chosen = bundle.recomputation
    if chosen is None or recorded is None or _flag_of(settings) is not None:
        return
    if recorded == chosen.every or not isinstance(bundle.model, RecomputesBlocks):
        return

    is_less = chosen.every > 0 and (recorded == 0 or recorded > chosen.every)
    reason = f"{_described(recorded)}, as before the run was resumed; this start alone would choose"
    reason = f"{reason} {chosen.reason}"
    if is_less:
        reason = f"{reason}; if memory runs out, add --gradient_checkpointing"
    bundle.model.recompute_blocks(recorded)
    bundle.recomputation = Recomputation(recorded, reason)


def _flag_of(settings: Settings) -> bool | None:
    """Return ``--gradient_checkpointing``; ``None`` for ``auto``, and false if there is no flag."""
    flag: bool | None = value_of(settings, "gradient_checkpointing", default=False)
    return flag


def _described(every: int) -> str:
    """Return which blocks are recomputed, in words."""
    if every == 0:
        return "no block"
    return "all blocks" if every == 1 else f"one of {every} blocks"
