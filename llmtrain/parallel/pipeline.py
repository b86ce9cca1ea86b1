"""Pipeline parallelism: consecutive layers of a model form stages, each on a separate rank.

The micro-batches of a step follow each other through the stages, which pass activations on and
gradients back. Once the pipeline is full, a stage makes one forward and one backward pass in turn
(1F1B; Narayanan et al. 2019, DOI 10.1145/3341301.3359646), by torch.distributed.pipelining.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.parallel.collectives import swap_with
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.sharded import ShardedEngine
from llmtrain.parallel.shards import local_shard
from llmtrain.parallel.stages import Staged, gather_stages, holders_of
from llmtrain.types import Batch, LossSums, Objective


class PipelinedEngine(ShardedEngine):
    """Every rank computes some layers of the model.

    Args:
        accelerator: the Accelerator of this run.
        model: this rank's stage.
        settings: the other arguments of :class:`Engine`.

    Raises:
        UserError: if the objective is not the default one.
    """

    runs_whole_forward = False
    may_choose_by_timing = False  # a single stage cannot be timed

    def __init__(self, accelerator: Accelerator, model: nn.Module, **settings: Any) -> None:
        super().__init__(accelerator, model, **settings)
        assert isinstance(model, Staged)
        if type(self.objective) is not Objective:
            raise UserError(
                f"{type(self.objective).__name__} cannot be computed by a pipeline; "
                "leave out --pipeline_stages."
            )
        self.width = model.width
        self.stages = sharding_of(accelerator).stages
        self.group = sharding_of(accelerator).submesh("pp").get_group()
        self.ranks_of_stages = dist.get_process_group_ranks(self.group)
        self.stage = dist.get_rank(self.group)
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.stages - 1

        self._scale = torch.ones((), device=self.device)  # of the loss of the current step
        self._step_function = functools.cache(self._make_step_function)
        self._tied = self._parameters_of_two_stages(model)

    def _parameters_of_two_stages(self, model: nn.Module) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters that this stage shares with another, and the other stage.

        That is the embedding, if it is also the head.
        """
        holders = holders_of(model, self.stages)
        tied = []
        for name, parameter in model.named_parameters():
            if len(holders[name]) > 1 and self.stage in holders[name]:
                other_stage = next(stage for stage in holders[name] if stage != self.stage)
                tied.append((parameter, other_stage))
        return tied

    def forward_backward(
        self, batches: Sequence[Batch], denominator: Tensor, extra: Batch | None = None
    ) -> LossSums:
        """Leave the gradient of the mean loss of the global batch in ``.grad``.

        The micro-batches of the step are those of the pipeline.

        Returns:
            The summed loss of this data-parallel rank, the same on every stage.
        """
        self._scale = self.data_parallel_size / denominator.clamp(min=1)
        # The schedule splits tensors only. Models find documents in the position ids again.
        columns = {
            name: torch.cat([batch[name] for batch in batches])
            for name, column in batches[0].items()
            if isinstance(column, Tensor)
        }
        ids = columns.pop("input_ids")
        scaled_losses: list[Tensor] = []

        step = self._step_function(len(batches), batches[0]["input_ids"].shape)
        step(
            *([ids] if self.is_first else []),
            target=ids if self.is_last else None,
            losses=scaled_losses if self.is_last else None,
            return_outputs=False,
            **columns,
        )

        for parameter, other_stage in self._tied:
            assert parameter.grad is not None
            gradient = local_shard(parameter.grad)
            gradient.add_(swap_with(self.ranks_of_stages[other_stage], gradient))

        loss = None
        if self.is_last:
            loss = torch.stack(scaled_losses).sum().detach() / self._scale
        return LossSums(self._from_last_stage(loss), metrics={})

    def loss(self, batch: Batch, extra: Batch | None = None) -> LossSums:
        """Return the summed loss of a micro-batch, on every stage, without a gradient."""
        columns = dict(batch)
        inputs = columns.pop("input_ids")
        rows, length = inputs.shape
        if not self.is_first:
            inputs = torch.empty(rows, length - 1, self.width, device=self.device)
            dist.recv(inputs, self.ranks_of_stages[self.stage - 1])

        output = self.model(inputs, **columns)
        if not self.is_last:
            dist.send(output, self.ranks_of_stages[self.stage + 1])
        loss = self._from_last_stage(output if self.is_last else None)
        return LossSums(loss, metrics={})

    def gatherable(self, tensors: dict[str, Tensor]) -> DistributedTensors:
        return gather_stages(self.accelerator, self.unwrapped, tensors)

    def _from_last_stage(self, loss: Tensor | None) -> Tensor:
        """Return the loss that the last stage has, on every stage."""
        loss = torch.zeros((), device=self.device) if loss is None else loss.float().clone()
        dist.broadcast(loss, self.ranks_of_stages[-1], self.group)
        return loss

    def _make_step_function(self, batches: int, shape: torch.Size) -> Callable[..., object]:
        """Return a function that computes a step of ``batches`` micro-batches of one shape."""
        # The import brings torch's compiler, for which `--help` and a mistyped flag must not wait.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rows, length = shape
        hidden = torch.empty(rows, length - 1, self.width, device="meta", requires_grad=True)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stage = PipelineStage(
            self.model,
            self.stage,
            self.stages,
            self.device,
            input_args=ids if self.is_first else hidden,
            output_args=loss if self.is_last else hidden,
            group=self.group,
        )
        # With fewer micro-batches than stages the two schedules are the same.
        schedule = Schedule1F1B if batches >= self.stages else ScheduleGPipe
        return schedule(
            stage,
            batches,
            loss_fn=lambda loss, _: loss * self._scale,
            scale_grads=False,
        ).step
