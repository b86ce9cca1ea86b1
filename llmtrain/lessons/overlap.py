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
from llmtrain.parallel.collectives import BucketAverage, BucketMean
from llmtrain.parallel.ddp import DDPHandler

PROCESSES = 2
DELAY = 0.05  # seconds


def on_a_slow_link(average: BucketAverage) -> BucketAverage:
    """Return what averages buckets as ``average`` does, but delays the last one."""

    def delayed(bucket: GradBucket) -> BucketMean:
        mean = average(bucket)
        return mean.then(wait) if bucket.is_last() else mean

    def wait(done: BucketMean) -> torch.Tensor:
        time.sleep(DELAY)
        return done.value()

    return delayed


def main() -> None:
    """Show the same steps with one bucket, with many, and with one that comes late."""
    accelerator = start_accelerator()
    one = _look(accelerator, "one bucket", mib=100)
    many = _look(accelerator, "many buckets", mib=0.5, table=True)
    late = _look(accelerator, f"many, the last {1000 * DELAY:.0f} ms late", mib=0.5, slow_link=True)
    if accelerator.is_main_process:
        claim("one bucket hides nothing", one.hidden == 0)
        claim("many buckets hide something", many.hidden > 0)
        claim(
            "the delay is exposed, within 10 %",
            abs((late.exposed - many.exposed) / DELAY - 1) < 0.1,
        )


def _look(
    accelerator: Accelerator,
    name: str,
    mib: float,
    slow_link: bool = False,
    table: bool = False,
) -> Communication:
    """X-ray some steps of a new model; returns the medians, on rank 0.

    Args:
        accelerator: the Accelerator of this lesson.
        name: what the line is about.
        mib: the size of a bucket.
        slow_link: whether the last bucket comes late.
        table: whether to print the x-ray's table.
    """
    accelerator.ddp_handler = DDPHandler(bucket_mib=mib)
    engine, optimizer = prepare(accelerator, small_gpt(n_layer=6, n_embd=128))
    phases = Phases(engine.device, engine.model)
    # a median of twenty: other programs run as well
    xray = XRay(engine, phases, engine.model, steps=range(4, 24))

    def watcher(bucket: GradBucket, average: BucketAverage, sent_bytes: int) -> BucketMean:
        send = on_a_slow_link(average) if slow_link else average
        return xray.on_bucket(bucket, send, sent_bytes)

    with engine.watching_buckets(watcher):
        for step in updates(engine, phases, optimizer, 23, partial(my_rows, accelerator, 16)):
            xray.at_step_boundary(step)

    if xray.report is None:
        return Communication(0.0, 0.0, 0.0)
    each = [xray.report.communication(update) for update in xray.report.updates]
    medians = Communication(*map(statistics.median, zip(*each, strict=True)))
    sent = 1000 * (medians.hidden + medians.exposed)
    measured(
        f"{name}: gradients travel {sent:.1f} ms an update, {1000 * medians.hidden:.1f} of it hidden"
    )
    for line in as_lines(xray.report) if table else []:
        measured(line)
    return medians
