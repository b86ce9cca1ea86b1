"""Distributed data parallel: every rank holds the same weights and averages its gradients with the others'."""

import inspect

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.console import say
from llmtrain.contract import Batch
from llmtrain.errors import UserError
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.exchange import EXCHANGES, Exchange, Watcher
from llmtrain.parallel.fsdp import parameter_groups


class DDPHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # accelerate has no types
    """The settings by which Accelerate wraps a model in DDP."""

    def __init__(self, config: ParallelConfig, bitwise: bool = False) -> None:
        super().__init__(gradient_as_bucket_view=True)
        self.config, self.bitwise = config, bitwise
        self.exchange: Exchange = EXCHANGES[config.ddp_comm_hook]()

    def to_kwargs(self) -> dict[str, object]:
        """Return the arguments of DDP that differ from its defaults. Raises :class:`UserError` for an old torch."""
        known = inspect.signature(DistributedDataParallel).parameters
        sends = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # of torch 2.13
        settings: dict[str, object] = {"gradient_as_bucket_view": True, sends: False}
        sizes = self.config.ddp_bucket_cap_mb
        if len(sizes) == 2:
            if "bucket_cap_mb_list" not in known:
                raise UserError(
                    f"two sizes of --ddp_bucket_cap_mb need torch 2.13; this is {torch.__version__}."
                )
            settings["bucket_cap_mb_list"] = sizes
        elif self.config.given("ddp_bucket_cap_mb") or sizes != [
            25.0
        ]:  # where left out, DDP's first has 1 MiB
            settings["bucket_cap_mb"] = sizes[0]
        return settings

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Have DDP send its buckets as the config says; Accelerate calls this."""
        if self.config.ddp_comm_hook != "none":
            model.register_comm_hook(None, self.exchange.__call__)
            say("exchange", f"approximate: {self.exchange.approximate}")

    def watch(self, model: nn.Module, watcher: Watcher) -> None:
        """Call ``watcher`` for every bucket that DDP sends, where it does. Before the first update."""
        self.exchange.watcher = watcher
        if isinstance(model, DistributedDataParallel) and self.config.ddp_comm_hook == "none":
            model.register_comm_hook(None, self.exchange.__call__)


def handler_of(accelerator: Accelerator) -> DDPHandler:
    """Return how this run's models are wrapped in DDP. Raises :class:`UserError` for an Accelerator of another's."""
    handler = accelerator.ddp_handler
    if not isinstance(handler, DDPHandler):
        raise UserError("this loop needs the Accelerator that llmtrain.start() makes.")
    return handler


def settle_buckets(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Bring DDP to where it is after a first update; the gradients are thrown away.

    DDP rebuilds its buckets once, in the order in which gradients came. In which order ranks are summed depends on the
    buckets, so on three ranks or more the sums of a resumed run would else differ in their last bits from those of one
    that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        exchange = handler_of(accelerator).exchange
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

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        ddp = isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        if torch.is_grad_enabled() and (ddp or any(group.reduce_grads for group in self.sharded)):
            self.count += 1

    def restart(self) -> None:
        """Count from 0 again."""
        self.count = 0
