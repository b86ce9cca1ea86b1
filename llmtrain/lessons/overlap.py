"""Overlap: gradients travel while the backward pass still computes, bucket by bucket.

The last layers' gradients come first. With one bucket for everything, nothing can be sent before the last gradient is
there: all of it is exposed. With several, the first travel meanwhile, and only the last is waited for. The x-ray that
shows it is the one of `llmtrain xray`.
"""

import statistics
import time
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import measured, rows, show, small_gpt, train_in_phases
from llmtrain.observe.phases import Phases
from llmtrain.observe.timeline import Communication, as_lines
from llmtrain.observe.xray import XRay
from llmtrain.parallel.ddp import DDPConfig, DDPHandler
from llmtrain.parallel.exchange import Exchange
from llmtrain.training.optim import OptimConfig, make_optimizer

PROCESSES = 2
DELAY = 0.05  # seconds


class Delayed(Exchange):
    """As if the link were slow for the last bucket."""

    def send(self, bucket: Any) -> Any:
        sent = super().send(bucket)
        return sent.then(self._late) if bucket.is_last() else sent

    def _late(self, done: Any) -> torch.Tensor:
        time.sleep(DELAY)
        return done.value()


def main() -> None:
    accelerator = start_accelerator()
    one = look(accelerator, "one bucket", DDPConfig(ddp_bucket_cap_mb=100), Exchange())
    many = look(accelerator, "many buckets", DDPConfig(ddp_bucket_cap_mb=0.5), Exchange(), table=True)
    late = look(accelerator, f"many, the last {1000 * DELAY:.0f} ms late", DDPConfig(ddp_bucket_cap_mb=0.5), Delayed())
    if accelerator.is_main_process:
        added = late.exposed - many.exposed
        show(f"one bucket hides nothing: {one.hidden == 0}; many hide something: {many.hidden > 0}")
        show(f"the delay is exposed, within 10 %: {abs(added / DELAY - 1) < 0.1}")
        assert one.hidden == 0 < many.hidden
        assert abs(added / DELAY - 1) < 0.1, f"{1000 * added:.1f} ms more are exposed"


def look(accelerator: Accelerator, name: str, ddp: DDPConfig, exchange: Exchange, table: bool = False) -> Communication:
    """X-ray some updates of a model that was not trained before."""
    accelerator.ddp_handler = DDPHandler(ddp)
    accelerator.ddp_handler.exchange = exchange
    plain = small_gpt(n_layer=6, n_embd=128)
    optimizer = make_optimizer(plain, OptimConfig(optim="adamw"))
    model, optimizer = accelerator.prepare(plain, optimizer)
    phases = Phases(accelerator, model)
    xray = XRay(accelerator, phases, model, range(4, 24))  # a median of twenty: other programs are about
    accelerator.ddp_handler.watch(model, xray.bucket)

    share = slice(8 * accelerator.process_index, 8 * accelerator.process_index + 8)
    windows = [rows(16, step)[share] for step in range(23)]
    train_in_phases(accelerator, model, optimizer, phases, windows, xray.between)
    found = Communication(0.0, 0.0, 0.0)
    if xray.report is not None:
        each = [xray.report.communication(update) for update in xray.report.updates]
        found = Communication(*map(statistics.median, zip(*each, strict=True)))
        sent, hidden = 1000 * (found.hidden + found.exposed), 1000 * found.hidden
        measured(f"{name}: gradients travel {sent:.1f} ms an update, {hidden:.1f} of it hidden")
        for line in as_lines(xray.report) if table else []:
            measured(line)
    return found
