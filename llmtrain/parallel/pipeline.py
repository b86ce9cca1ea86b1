"""Pipeline parallelism: consecutive layers of a model are stages, on ranks that pass activations on and gradients back.

The micro-batches of an update follow each other. Once the pipeline is full, a stage makes one forward and one backward
pass in turn (1F1B; Narayanan et al. 2019, DOI 10.1145/3341301.3359646), by torch.distributed.pipelining.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch
from llmtrain.parallel.collectives import swap_with
from llmtrain.parallel.mesh import Staged, data_parallel_size, holders_of, local_shard, sharding_of


class Pipeline:
    """A ``forward_backward`` through a model of which every rank has some layers (:class:`Staged`)."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        sharding = sharding_of(accelerator)
        assert isinstance(model, Staged)
        self.model, self.device, self.width = model, accelerator.device, model.width
        self.replicas = data_parallel_size(accelerator)
        self.group = sharding.submesh("pp").get_group()
        self.stage, self.stages = dist.get_rank(self.group), sharding.stages
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        self.ranks = dist.get_process_group_ranks(self.group)
        self.scale = torch.ones((), device=self.device)
        self._step = functools.cache(self._make_step)
        holders = holders_of(model, self.stages)
        self.shared = [  # what this stage and another hold: the embedding that is also the head
            (p, next(stage for stage in holders[name] if stage != self.stage))
            for name, p in model.named_parameters()
            if len(holders[name]) > 1 and self.stage in holders[name]
        ]

    def __call__(self, batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor:
        """Leave the gradient of sum(nll) / tokens of a window, whose micro-batches are the pipeline's.

        Returns the summed nll, the same on every stage.
        """
        self.scale = self.replicas / tokens.clamp(min=1)
        whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        ids = whole.pop("input_ids")
        scaled: list[torch.Tensor] = []
        inputs = [ids] if self.is_first else []
        target, losses = (ids, scaled) if self.is_last else (None, None)
        step = self._step(len(batches), batches[0]["input_ids"].shape)
        step(*inputs, target=target, losses=losses, return_outputs=False, **whole)
        for parameter, other in self.shared:
            assert parameter.grad is not None
            mine = local_shard(parameter.grad)
            mine.add_(swap_with(self.ranks[other], mine))
        return self._from_last(
            torch.stack(scaled).sum().detach() / self.scale if self.is_last else None
        )

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Return the summed nll of a batch, on every stage, without a gradient."""
        x = batch.pop("input_ids")
        rows, length = x.shape
        if not self.is_first:
            x = torch.empty(rows, length - 1, self.width, device=self.device)
            dist.recv(x, self.ranks[self.stage - 1])
        y = self.model(x, **batch)
        if not self.is_last:
            dist.send(y, self.ranks[self.stage + 1])
        return self._from_last(y if self.is_last else None)

    def _from_last(self, nll: torch.Tensor | None) -> torch.Tensor:
        nll = torch.zeros((), device=self.device) if nll is None else nll.float().clone()
        dist.broadcast(nll, self.ranks[-1], self.group)
        return nll

    def _make_step(self, count: int, shape: torch.Size) -> Callable[..., object]:
        """Return what computes a window of ``count`` micro-batches of this shape."""
        # brings torch's compiler with it, which `--help` and a mistyped flag must not wait for
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rows, length = shape
        hidden = torch.empty(rows, length - 1, self.width, device="meta", requires_grad=True)
        inputs = torch.empty(shape, dtype=torch.int64, device="meta") if self.is_first else hidden
        output = torch.empty((), device="meta", requires_grad=True) if self.is_last else hidden
        place = self.model, self.stage, self.stages, self.device
        stage = PipelineStage(*place, input_args=inputs, output_args=output, group=self.group)
        kind = (
            Schedule1F1B if count >= self.stages else ScheduleGPipe
        )  # with fewer they are the same
        return kind(stage, count, loss_fn=lambda nll, _: nll * self.scale, scale_grads=False).step
