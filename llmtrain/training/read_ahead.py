"""Read batches on another thread while the loop trains."""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from typing import TypeAlias, TypeVar

import torch
from accelerate.data_loader import DataLoaderShard

from llmtrain.errors import DamagedRowsError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.parallel.engine import Engine

Item = TypeVar("Item")
# Takes the error, and the number of good items before the damaged one.
OnDamage: TypeAlias = Callable[[DamagedRowsError, int], None]

_READER_SECONDS = 5.0  # to wait for the thread that reads ahead, when reading ends


def read_ahead(
    items: Iterator[Item],
    on_damage: OnDamage,
    known: int = 1,
    prepare_thread: Callable[[], None] | None = None,
) -> Generator[tuple[Item, bool]]:
    """Yield each item and whether no other follows, while another thread reads the next.

    When an item is yielded, the next ``known`` items have been read, and the thread is reading the
    one after them. If reading one fails, the items before it are yielded, and then the error is
    raised.

    Args:
        items: the items, none of which is ``None``.
        on_damage: called before an item is yielded, if one of the next ``known`` items is damaged.
        known: the number of items, at least 1.
        prepare_thread: called once on the other thread, before it reads.
    """
    reader = futures.ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=prepare_thread)
    # Those of items that are not yielded yet. After the last item, the result is `None`.
    reads = deque([reader.submit(next, items, None)])
    try:
        while (item := reads[0].result()) is not None:
            while len(reads) < known + 2:
                error = reads[-1].exception()  # this waits for the read
                if isinstance(error, DamagedRowsError):
                    on_damage(error, len(reads) - 1)
                if error is not None or reads[-1].result() is None:
                    break
                reads.append(reader.submit(next, items, None))
            reads.popleft()
            yield item, len(reads) == 1
    finally:
        # If an error passes, a read that hangs must not keep this rank from reporting the error.
        _, hanging = futures.wait(reads, timeout=_READER_SECONDS)
        reader.shutdown(wait=not hanging, cancel_futures=True)


def read_batches(
    loader: DataLoaderShard, engine: Engine, on_damage: OnDamage
) -> Generator[LocalBatch]:
    """Yield the batches of a prepared loader, on its device, and read ahead meanwhile.

    This replaces ``DataLoaderShard.__iter__`` and makes the same calls. Only reading and collating
    move to the other thread. ``begin`` and ``end`` are called on this one: they change Accelerate's
    gradient state, which is not thread-safe, and evaluations on this thread change it too. Waiting
    for a batch is the phase ``data``.

    If a batch is damaged, ``on_damage`` is called before the last good batch is yielded. With
    several ranks it is also called one batch earlier, because the others learn of a vote to stop
    one step later.
    """
    choose_device = None
    if engine.device.type == "cuda":  # each thread has its own current device
        choose_device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())

    engine.phases.begin("data")
    loader.set_epoch(loader.iteration)
    known = 1 if engine.ranks.world_size == 1 else 2
    host_batches = read_ahead(iter(loader.base_dataloader), on_damage, known, choose_device)
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
