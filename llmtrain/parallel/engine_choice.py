"""Choose the engine of a run."""

from accelerate import Accelerator
from torch import nn

from llmtrain.console import say
from llmtrain.interfaces.objective import Objective
from llmtrain.parallel.bitwise import BitwiseEngine
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.sharding import sharding_of


def engine_for(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    config: ParallelConfig,
    accumulation: int,
) -> Engine:
    """Return the engine for the parallel method that the accelerate config asks for.

    Args:
        accelerator: the Accelerator of this run.
        model: the model that ``accelerator.prepare`` returned.
        objective: the loss that is minimised.
        config: how ranks exchange gradients.
        accumulation: how many micro-batches a step has.
    """
    if config.bitwise:
        return BitwiseEngine(accelerator, model, objective=objective)

    if not sharding_of(accelerator).is_sharded:
        return ReplicatedEngine(
            accelerator,
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
    return ShardedEngine(
        accelerator, model, objective=objective, sync_each_batch=config.sync_each_batch
    )
