"""Distributed data parallel: every process holds the same weights and averages its gradients with the others'."""

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.config import flag, require, require_at_least
from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.parallel.exchange import EXCHANGES, Exchange, Watcher
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.shards import same_rows


@dataclass
class DDPConfig:
    """How DDP's processes exchange gradients, and how long they wait for each other. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "distributed data parallel"

    ddp_bucket_cap_mb: float | None = flag(None, "MiB of gradients that are sent at once (25 where left out)")
    ddp_first_bucket_mb: float | None = flag(None, "MiB of the first, which is sent early (1, or as the others)")
    ddp_static_graph: bool = flag(False, "every update computes with the same parameters: DDP need not look")
    ddp_gradient_as_bucket_view: bool = flag(True, "gradients live in the buckets that are sent, not beside them")
    ddp_comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = flag(
        "none", "send less than the whole gradients, approximately: rounded to 16 bits, or with a low rank"
    )
    sync_every: int = flag(1, "updates that each process makes alone before all average their weights (local SGD)")
    ddp_timeout: int = flag(1800, "seconds that processes wait for each other before one that is missing is named")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "sync_every", "ddp_timeout")
        for name in ("ddp_bucket_cap_mb", "ddp_first_bucket_mb"):
            size = getattr(self, name)
            require(size is None or 0 < size < float("inf"), f"--{name} {size} is out of range: it must be above 0.")
        require(
            self.sync_every == 1 or self.ddp_comm_hook == "none",
            f"--sync_every {self.sync_every} sends no gradients, so --ddp_comm_hook {self.ddp_comm_hook} has nothing "
            "to do; leave one of them out.",
        )

    @property
    def approximation(self) -> dict[str, Any] | None:
        """What of these makes another run of it; ``None`` where the updates are those of one process."""
        if self.ddp_comm_hook == "none" and self.sync_every == 1:
            return None
        return {"ddp_comm_hook": self.ddp_comm_hook, "sync_every": self.sync_every}


class DDPHandler(DistributedDataParallelKwargs):
    """How Accelerate wraps a model in DDP here."""

    def __init__(self, config: DDPConfig) -> None:
        super().__init__(
            static_graph=config.ddp_static_graph, gradient_as_bucket_view=config.ddp_gradient_as_bucket_view
        )
        self.config = config
        self.exchange: Exchange = EXCHANGES[config.ddp_comm_hook]()

    def to_kwargs(self) -> dict[str, Any]:
        config = self.config
        settings = {"static_graph": self.static_graph, "gradient_as_bucket_view": self.gradient_as_bucket_view}
        if config.ddp_first_bucket_mb is not None:
            if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
                raise UserError(f"--ddp_first_bucket_mb needs torch 2.13; this is {torch.__version__}.")
            return settings | {"bucket_cap_mb_list": [config.ddp_first_bucket_mb, config.ddp_bucket_cap_mb or 25]}
        return settings | ({"bucket_cap_mb": config.ddp_bucket_cap_mb} if config.ddp_bucket_cap_mb else {})

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        if self.config.ddp_comm_hook != "none":
            model.register_comm_hook(None, self.exchange.__call__)
            say("exchange", f"approximate: {self.exchange.approximate}")
        if self.config.sync_every > 1:
            alone = f"every process makes {self.config.sync_every} updates alone, then all average their weights"
            say("exchange", f"approximate: {alone}")

    def watch(self, model: nn.Module, watcher: Watcher) -> bool:
        """Have ``watcher`` called for every bucket that DDP sends; whether it sends any. Before the first update."""
        if not isinstance(model, DistributedDataParallel):
            return False
        if self.config.ddp_comm_hook == "none":
            model.register_comm_hook(None, self.exchange.__call__)
        self.exchange.watcher = watcher
        return True


def data_parallel_size(accelerator: Accelerator) -> int:
    """Over how many replicas gradients are averaged; the loss is multiplied by it to turn the mean into the sum."""
    return accelerator.num_processes // same_rows(accelerator)


def data_parallel_rank(accelerator: Accelerator) -> int:
    """Which share of the rows is this process's."""
    return accelerator.process_index // same_rows(accelerator)


def settle_buckets(accelerator: Accelerator, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Bring DDP to where it is after a first update; the gradients are thrown away.

    DDP rebuilds its buckets once, in the order in which gradients came. Which process adds which part first depends on
    the buckets, so on three processes or more the sums of a run that goes on would else differ in their last bits from
    those of one that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        exchange = accelerator.ddp_handler.exchange
        exchange.exact = True  # what it carries from update to update is not for this
        accelerator.backward(model(**batch))
        exchange.exact = False
        model.zero_grad()


class GradientSyncs:
    """Counts the backward passes whose gradients are reduced: one an update, however many micro-batches it has.

    Losses and weights agree even when every micro-batch is reduced; only the time does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.sharded = parameter_groups(model)
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        ddp = getattr(model, "require_backward_grad_sync", False)
        if torch.is_grad_enabled() and (ddp or any(group.reduce_grads for group in self.sharded)):
            self.count += 1

    def restart(self) -> None:
        self.count = 0
