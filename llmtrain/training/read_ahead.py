"""Read batches on another thread while the loop trains."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from typing import TypeVar

import torch
from accelerate.data_loader import DataLoaderShard

from llmtrain.interfaces.batches import LocalBatch
from llmtrain.parallel.engine import Engine

Item = TypeVar("Item")

_READER_SECONDS = 5.0  # to wait for the thread that reads ahead, when reading ends


def read_ahead(
    items: Iterator[Item], prepare_thread: Callable[[], None] | None = None
) -> Generator[tuple[Item, bool]]:
    """Yield each item and whether it is the last one, while another thread reads the next.

    To know whether an item is the last, this waits for the item after it. So when an item is
    yielded, the thread is already reading the second one after it.

    Args:
        items: the items, none of which is ``None``.
        prepare_thread: called once on the other thread, before it reads.
    """
    reader = futures.ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=prepare_thread)
    # After the last item, the result of a read is `None`.
    pending_read = reader.submit(next, items, None)
    try:
        item = pending_read.result()
        pending_read = reader.submit(next, items, None)
        while item is not None:
            next_item = pending_read.result()
            if next_item is not None:
                pending_read = reader.submit(next, items, None)
            yield item, next_item is None
            item = next_item
    finally:
        # If an error passes, a read that hangs must not keep this rank from reporting the error.
        _, hanging = futures.wait([pending_read], timeout=_READER_SECONDS)
        reader.shutdown(wait=not hanging, cancel_futures=True)


def read_batches(loader: DataLoaderShard, engine: Engine) -> Generator[LocalBatch]:
    """Yield the batches of a prepared loader, on its device, and read ahead meanwhile.

    This replaces ``DataLoaderShard.__iter__`` and makes the same calls. Only reading and collating
    move to the other thread. ``begin`` and ``end`` are called on this one: they change Accelerate's
    gradient state, which is not thread-safe, and evaluations on this thread change it too. Waiting
    for a batch is the phase ``data``.
    """
    choose_device = None
    if engine.device.type == "cuda":  # each thread has its own current device
        choose_device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())

    engine.phases.begin("data")
    loader.set_epoch(loader.iteration)
    host_batches = read_ahead(iter(loader.base_dataloader), choose_device)
    loader.begin()
    try:
        with contextlib.closing(host_batches):
            for host_batch, is_last in host_batches:
                if is_last:
                    loader.end_of_dataloader = True
                batch = host_batch
                if loader.device is not None:
                    non_blocking = engine.accelerator.non_blocking
                    batch = host_batch.to(loader.device, non_blocking=non_blocking)
                yield batch
                engine.phases.begin("data")
        loader.iteration += 1
    finally:
        loader.end()
