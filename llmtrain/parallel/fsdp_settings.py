"""Settings with which Accelerate shards models with FSDP2."""

import torch
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from llmtrain.parallel.mesh import Sharding


def sharding_settings(sharding: Sharding, on_cpu: bool, precision: str) -> dict[str, object]:
    """Return the arguments of ``Accelerator`` that make it shard models.

    If ``precision`` is ``bf16``, weights are gathered in bfloat16 and gradients are summed in
    float32. Inputs are not cast, because autocast chooses the precision of each product, as under
    DDP.
    """
    mixed_precision = MixedPrecisionPolicy()
    if precision == "bf16":
        mixed_precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    offload = None
    if sharding.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=not on_cpu)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",  # fsdp.shard() chooses what is gathered together
        mixed_precision_policy=mixed_precision,
        cpu_ram_efficient_loading=False,  # weights are loaded one by one
        state_dict_type="SHARDED_STATE_DICT",  # not used
        cpu_offload=offload,
    )

    # Tensor parallelism is not declared here, because Accelerate 1.15 would then import classes
    # that transformers no longer has. Sharding.set_mesh() gives Accelerate a mesh instead.
    replicas = sharding.replicas if sharding.model_parallel_size == 1 else 1
    sizes = ParallelismConfig(
        dp_replicate_size=replicas,
        dp_shard_size=sharding.processes // replicas,
        tp_size=1,
    )
    return {"fsdp_plugin": plugin, "parallelism_config": sizes}


def let_cpus_shard(**process_group: object) -> None:
    """Join the process group on CPUs, and make Accelerate accept FSDP there.

    Accelerate 1.15 uses FSDP only if the processes have accelerators, and would silently use DDP.
    """
    state = PartialState(cpu=True, **process_group)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
