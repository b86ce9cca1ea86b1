"""Choose the engine of a run."""

from torch import nn

from llmtrain.console import say
from llmtrain.interfaces.objective import Objective
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.ranks import Ranks


def engine_for(
    ranks: Ranks,
    model: nn.Module,
    objective: Objective,
    config: ParallelConfig,
    accumulation: int,
) -> Engine:
    """Return the engine for the parallel method that the accelerate config asks for.

    Args:
        ranks: the ranks that train the model.
        model: the model that ``accelerator.prepare`` returned.
        objective: the loss that is minimised.
        config: how ranks exchange gradients.
        accumulation: how many micro-batches a step has.
    """
    if config.bitwise:
        return BitwiseEngine(ranks, model, objective=objective)

    if not ranks.is_sharded:
        return ReplicatedEngine(
            ranks,
            model,
            objective=objective,
            sync_each_batch=config.sync_each_batch,
            comm_hook=config.ddp_comm_hook,
        )

    if accumulation > 1 and not config.sync_each_batch:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(
            "gradients",
            f"add up in full over {accumulation} micro-batches, "
            f"{4 * trained / 2**20:.1f} MiB per process, and are reduced once; "
            "with --sync_each_batch a process holds only its shard",
        )
    return ShardedEngine(ranks, model, objective=objective, sync_each_batch=config.sync_each_batch)
