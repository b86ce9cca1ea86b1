"""Overlap: gradients travel while the backward pass still computes, bucket by bucket.

The last layers' gradients come first. With one bucket for everything, nothing can be sent before the last gradient is
there: all of it is exposed. With several, the first travel meanwhile, and only the last is waited for. The x-ray that
shows it is the one of `llmtrain xray`.
"""

import statistics
import time
from functools import partial

import torch
from accelerate import Accelerator
from torch._C._distributed_c10d import GradBucket

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import claim, measured, my_rows, prepare, small_gpt, updates
from llmtrain.observe.phases import Phases
from llmtrain.observe.timeline import Communication, as_lines
from llmtrain.observe.xray import XRay
from llmtrain.parallel.collectives import BucketMean
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.parallel.exchange import Exchange

PROCESSES = 2
DELAY = 0.05  # seconds


class SlowLastBucket(Exchange):
    """Sends gradients as if the link were slow for the last bucket."""

    def send(self, bucket: GradBucket) -> BucketMean:
        """Return the bucket's sum, late where it is the last."""

        def wait(done: BucketMean) -> torch.Tensor:
            time.sleep(DELAY)
            return done.value()

        sent = super().send(bucket)
        return sent.then(wait) if bucket.is_last() else sent


def main() -> None:
    """Show the same updates with one bucket, with many, and with one that comes late."""
    accelerator = start_accelerator()
    one = _look(accelerator, "one bucket", 100, Exchange())
    many = _look(accelerator, "many buckets", 0.5, Exchange(), table=True)
    late = _look(accelerator, f"many, the last {1000 * DELAY:.0f} ms late", 0.5, SlowLastBucket())
    if accelerator.is_main_process:
        claim("one bucket hides nothing", one.hidden == 0)
        claim("many buckets hide something", many.hidden > 0)
        claim(
            "the delay is exposed, within 10 %",
            abs((late.exposed - many.exposed) / DELAY - 1) < 0.1,
        )


def _look(
    accelerator: Accelerator, name: str, mib: float, exchange: Exchange, table: bool = False
) -> Communication:
    """X-ray some updates of a model that was not trained before; returns the medians, on rank 0."""
    handler = accelerator.ddp_handler = DDPHandler(ParallelConfig(ddp_bucket_cap_mb=[mib]))
    handler.exchange = exchange
    model, optimizer = prepare(accelerator, small_gpt(n_layer=6, n_embd=128))
    phases = Phases(accelerator, model)
    xray = XRay(
        accelerator, phases, model, range(4, 24)
    )  # a median of twenty: other programs run as well
    handler.watch(model, xray.bucket)
    for step in updates(phases, optimizer, 23, partial(my_rows, accelerator, 16)):
        xray.between(step)
    if xray.report is None:
        return Communication(0.0, 0.0, 0.0)
    each = [xray.report.communication(update) for update in xray.report.updates]
    found = Communication(*map(statistics.median, zip(*each, strict=True)))
    sent, hidden = 1000 * (found.hidden + found.exposed), 1000 * found.hidden
    measured(f"{name}: gradients travel {sent:.1f} ms an update, {hidden:.1f} of it hidden")
    for line in as_lines(xray.report) if table else []:
        measured(line)
    return found
