"""Pipeline parallelism: the layers of a model, one after the other, on processes that pass activations on and gradients
back. The micro-batches of an update follow each other; once the pipeline is full, a stage makes one forward and one
backward pass in turn (1F1B; Narayanan et al. 2019, DOI 10.1145/3341301.3359646), by torch.distributed.pipelining.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.config import flag, require_at_least
from llmtrain.parallel.ddp import data_parallel_size
from llmtrain.shards import local, sharding_of

Batch = dict[str, torch.Tensor]


@dataclass
class PipelineConfig:
    """Whether the model is cut into stages that pass activations on. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "pipeline parallelism"

    pipeline_stages: int = flag(1, "parts into which the model's layers are cut, each on a process of its own")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "pipeline_stages")


class Pipeline:
    """Forward and backward passes of a model of which every process has some layers (:meth:`GPT.keep`)."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        sharding = sharding_of(accelerator)
        self.model, self.device = model, accelerator.device
        self.group = sharding.mesh["pp"].get_group()
        self.stage, self.stages = dist.get_rank(self.group), sharding.stages
        self.ranks = dist.get_process_group_ranks(self.group)
        self.scale = torch.ones((), device=self.device)
        self._schedules: dict[Any, Any] = {}
        shared = [p for p in model.parameters() if len(holders := p.stages) > 1 and self.stage in holders]  # type: ignore[attr-defined]
        self.shared = [(p, next(s for s in p.stages if s != self.stage)) for p in shared]  # type: ignore[attr-defined]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def __call__(
        self, accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], tokens: torch.Tensor
    ) -> torch.Tensor:
        """As :func:`llmtrain.training.loop.accumulate`: the micro-batches of a window are the pipeline's."""
        self.scale = data_parallel_size(accelerator) / tokens.clamp(min=1)
        whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        ids = whole.pop("input_ids")
        scaled: list[torch.Tensor] = []
        arguments = [ids] if self.is_first else []
        to_be = {"target": ids, "losses": scaled} if self.is_last else {}
        schedule = self._schedule(len(batches), batches[0]["input_ids"].shape)
        schedule.step(*arguments, **to_be, return_outputs=False, **whole)
        self._add_shared_gradients()
        return self._from_last(torch.stack(scaled).sum().detach() / self.scale if self.is_last else None)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The summed nll of a batch, on every stage; no gradient."""
        x = batch.pop("input_ids")
        rows, length = x.shape
        if not self.is_first:
            x = torch.empty(rows, length - 1, self._width, device=self.device)
            dist.recv(x, self.ranks[self.stage - 1])
        y = self.model(x, **batch)
        if not self.is_last:
            dist.send(y, self.ranks[self.stage + 1])
        return self._from_last(y if self.is_last else None)

    @property
    def _width(self) -> int:
        return self.model.config.n_embd  # type: ignore[union-attr,return-value]

    def _from_last(self, nll: torch.Tensor | None) -> torch.Tensor:
        nll = torch.zeros((), device=self.device) if nll is None else nll.float().clone()
        dist.broadcast(nll, self.ranks[-1], self.group)
        return nll

    def _schedule(self, count: int, shape: torch.Size) -> Any:
        # brings torch's compiler with it, which `--help` and a mistyped flag must not wait for
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        if (count, shape) not in self._schedules:
            rows, length = shape
            hidden = torch.empty(rows, length - 1, self._width, device="meta", requires_grad=True)
            inputs = torch.empty(shape, dtype=torch.int64, device="meta") if self.is_first else hidden
            output = torch.empty((), device="meta", requires_grad=True) if self.is_last else hidden
            place = self.model, self.stage, self.stages, self.device
            stage = PipelineStage(*place, input_args=inputs, output_args=output, group=self.group)
            kind = Schedule1F1B if count >= self.stages else ScheduleGPipe  # with fewer they are the same
            schedule = kind(stage, count, loss_fn=lambda nll, _: nll * self.scale, scale_grads=False)
            self._schedules[count, shape] = schedule
        return self._schedules[count, shape]

    def _add_shared_gradients(self) -> None:
        """Of what two stages hold, the embedding that is also the head, the gradient is the sum of both."""
        for parameter, other in self.shared:
            mine = local(parameter.grad)  # type: ignore[arg-type]
            theirs, peer = torch.empty_like(mine), self.ranks[other]
            operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
            for request in dist.batch_isend_irecv(operations):
                request.wait()
            mine.add_(theirs)
