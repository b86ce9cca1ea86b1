"""Train a model that is sharded over the ranks: with FSDP2, tensor parallelism, or both."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmtrain.parallel.blocks import reshard
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.shards import local_shard, shards_over
from llmtrain.parallel.stages import holders_of


class ShardedEngine(Engine):
    """Every rank holds a shard of the weights, of their gradients and of the optimizer state."""

    is_sharded = True

    @property
    def blocks_communicate(self) -> bool:
        return sharding_of(self.accelerator).tensor > 1

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if sharding_of(self.accelerator).model_parallel_size == 1:
            norm = super().clip_grad_norm(max_norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

        # Under tensor or pipeline parallelism, parameters are on different meshes, and torch would
        # sum the norm on each mesh by itself. Here the squares of all shards are summed once.
        shards = {
            name: local_shard(parameter.grad)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        norm = self._norm_of_shards(shards)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_
        for shard in shards.values():
            shard.mul_(scale)
        return norm

    @torch.no_grad()
    def weight_norm(self) -> Tensor:
        shards = {
            name: local_shard(parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta
        }
        return self._norm_of_shards(shards)

    def _norm_of_shards(self, shards: dict[str, Tensor]) -> Tensor:
        """Return the norm of tensors of which each rank has a shard.

        The square of every shard is divided by the number of ranks that have this shard, and summed
        over all ranks.

        Args:
            shards: this rank's shards of parameters, or of their gradients, by the name of the
                parameter.
        """
        sharding = sharding_of(self.accelerator)
        stage = sharding.submesh("pp").get_local_rank() if sharding.stages > 1 else 0
        holders = holders_of(self.model, sharding.stages)
        parameters = dict(self.model.named_parameters())
        squares = []
        for name, shard in shards.items():
            square = torch.linalg.vector_norm(shard, dtype=torch.float32).square()
            different_shards = math.prod(shards_over(parameters[name]).values())
            is_counted = holders[name][0] == stage  # a tied weight counts on its first stage
            squares.append(square * (different_shards if is_counted else 0))

        # The same shard is on (ranks / stages) / different_shards ranks. Divide by this number; the
        # squares contain different_shards already.
        local_sum = torch.stack(squares).sum() * (sharding.stages / self.world_size)
        total = self.accelerator.reduce(local_sum.to(self.device), reduction="sum")
        return torch.sqrt(total)

    def free_gathered_weights(self) -> None:
        reshard(self.model)
