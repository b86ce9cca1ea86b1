"""Render conversations in several processes, in their order."""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.records import Chat, ReadRecord
from llmtrain.data.render import AnyRenderer, Rendered
from llmtrain.errors import UserError

Result: TypeAlias = Rendered | BadRecord

# Fewer conversations take less time than the start of processes.
FEWEST_FOR_PROCESSES = 2_000
CHUNK_SIZE = 200  # conversations
_CHUNKS_PER_PROCESS = 3  # that wait, are rendered or have been rendered
_renderers: list[AnyRenderer] = []  # the one of a forked process


def render_all(
    renderer: AnyRenderer, records: Iterable[ReadRecord[Chat]], processes: int
) -> Iterator[tuple[ReadRecord[Chat], Result]]:
    """Render conversations or preference records, in several processes if there are many.

    Processes are forked, as ``datasets.map(num_proc=...)`` forks them: they need neither to import
    anything nor to get a tokenizer with code of its own, and they do not run the user's script
    again. On other systems than Linux, where libraries do not survive a fork, there is only this
    process.

    Yields:
        Each record, and its tokens, or why it cannot be rendered; in the order of ``records``.

    Raises:
        UserError: if a process ends before it has rendered its conversations.
    """
    remaining = iter(records)
    if processes > 1 and sys.platform == "linux":
        first = list(itertools.islice(remaining, FEWEST_FOR_PROCESSES))
        remaining = itertools.chain(first, remaining)
        if len(first) == FEWEST_FOR_PROCESSES:
            yield from _render_in_pool(renderer, remaining, processes)
            return

    for read in remaining:
        yield read, _rendered(renderer, read.record)


def _rendered(renderer: AnyRenderer, record: Conversation | PreferenceRecord) -> Result:
    try:
        return renderer(record)
    except BadRecord as error:
        return error


def _render_in_pool(
    renderer: AnyRenderer, records: Iterator[ReadRecord[Chat]], processes: int
) -> Iterator[tuple[ReadRecord[Chat], Result]]:
    """Render records in chunks, and yield the results in order."""
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(renderer,),
    )
    # Executor.map would read all records at once.
    pending: deque[tuple[list[ReadRecord[Chat]], Future[list[Result]]]] = deque()
    try:
        while True:
            chunk = list(itertools.islice(records, CHUNK_SIZE))
            if chunk:
                future = pool.submit(_render_chunk, [read.record for read in chunk])
                pending.append((chunk, future))
            if not pending:
                return
            if not chunk or len(pending) == _CHUNKS_PER_PROCESS * processes:
                oldest, future = pending.popleft()
                yield from zip(oldest, future.result(), strict=True)
    except BrokenProcessPool:
        raise UserError(
            "a process that renders conversations has ended; if the machine has too little memory "
            "for it, use fewer with --dataset_num_proc."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# --- in a forked process


def _start_worker(renderer: AnyRenderer) -> None:
    """Prepare a process, which then ends on signals, and with the process that forked it."""
    # Ctrl-C and a closed terminal reach only the first process, which ends this one.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _renderers.append(renderer)


def _end_with_parent() -> None:
    """Wait until the process that forked this one is gone, even if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was forked"
    parent.join()
    os._exit(1)


def _render_chunk(records: list[Conversation | PreferenceRecord]) -> list[Result]:
    return [_rendered(_renderers[0], record) for record in records]
