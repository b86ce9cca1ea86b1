"""Overlap: gradients travel bucket by bucket while the backward pass computes.

The gradients of the last layers come first. With one bucket for everything, nothing can be sent
before the last gradient is there: all sending is exposed. With several buckets, the first travel
meanwhile, and only the last is waited for. The x-ray that shows it is that of `llmtrain xray`.
"""

import statistics
import time
from functools import partial

import torch
from accelerate import Accelerator
from torch.distributed import GradBucket

from llmtrain.lab.xray.recording import Communication, Recording
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    BucketAverage,
    BucketFuture,
    Training,
    claim,
    rank_rows,
    show_measured,
    small_gpt,
)
from llmtrain.observe.xray import XRay

DELAY_SECONDS = 0.05

# The medians are over twenty steps, because other programs run as well.
STEPS = 23
XRAYED_STEPS = range(4, 24)


def main() -> None:
    """Show steps with one bucket, with many, and with a last bucket that comes late."""
    accelerator = start_accelerator()
    one = _xray(accelerator, "one bucket", bucket_mib=100)
    many = _xray(accelerator, "many buckets", bucket_mib=0.5)
    delayed = _xray(
        accelerator,
        f"many, the last {1000 * DELAY_SECONDS:.0f} ms late",
        bucket_mib=0.5,
        delays_last_bucket=True,
    )
    if accelerator.is_main_process:
        claim("one bucket hides nothing", one.hidden == 0)
        claim("many buckets hide something", many.hidden > 0)
        exposed_delay = delayed.exposed - many.exposed
        claim("the delay is exposed, within 10 %", abs(exposed_delay / DELAY_SECONDS - 1) < 0.1)


def _xray(
    accelerator: Accelerator,
    name: str,
    bucket_mib: float,
    delays_last_bucket: bool = False,
) -> Communication:
    """X-ray some steps of a new model, and print how long gradients travel.

    Args:
        accelerator: the Accelerator of this lesson.
        name: what the line is about.
        bucket_mib: the size of a bucket.
        delays_last_bucket: whether the last bucket comes late.

    Returns:
        The medians over the steps on rank 0, and zeros on other ranks.
    """
    accelerator.ddp_handler.bucket_mib = bucket_mib
    training = Training(accelerator, small_gpt(n_layer=6, n_embd=128))
    engine = training.engine
    xray = XRay(engine.ranks, engine.phases, engine.model, steps=XRAYED_STEPS)

    def watcher(bucket: GradBucket, average: BucketAverage) -> BucketFuture:
        send = _delaying_last_bucket(average) if delays_last_bucket else average
        return xray.on_bucket(bucket, send)

    load = partial(rank_rows, accelerator, 16)
    with engine.watching_buckets(watcher):
        for step in training.steps(STEPS, load):
            xray.at_step_boundary(step)

    if xray.recording is None:
        return Communication(0.0, 0.0, 0.0)
    recording = Recording.from_json(xray.recording)
    each_step = [recording.communication(step) for step in recording.steps]
    medians = Communication(*map(statistics.median, zip(*each_step, strict=True)))
    travelling = 1000 * (medians.hidden + medians.exposed)
    hidden = 1000 * medians.hidden
    show_measured(
        f"{name}: gradients travel {travelling:.1f} ms per step, {hidden:.1f} of it hidden"
    )
    return medians


def _delaying_last_bucket(average: BucketAverage) -> BucketAverage:
    """Return a function that averages buckets, but delays the last one."""

    def average_late(bucket: GradBucket) -> BucketFuture:
        mean = average(bucket)
        return mean.then(wait) if bucket.is_last() else mean

    def wait(mean: BucketFuture) -> torch.Tensor:
        time.sleep(DELAY_SECONDS)
        return mean.value()

    return average_late
