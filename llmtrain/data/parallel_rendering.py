"""Render conversations in several processes, in their order.

``concurrent.futures.ProcessPoolExecutor`` is as fast, but runs the user's script again in each
process, and fails if the script has no ``if __name__ == "__main__"``. The processes here end when
their connection is closed, so none outlives the process that started it, even if that is killed.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.render import AnyRenderer
from llmtrain.data.rendered import Rendered
from llmtrain.errors import UserError

Item = TypeVar("Item", bound=Conversation | PreferenceRecord)
Tag = TypeVar("Tag")
Result: TypeAlias = Rendered | BadRecord

# Fewer conversations take less time than the start of a process.
FEWEST_FOR_PROCESSES = 2_000
CHUNK_SIZE = 200  # conversations
_CHUNKS_PER_PROCESS = 3  # that wait, are rendered or have been rendered
_COMMAND = "from llmtrain.data.parallel_rendering import work; work({file_descriptor})"


def render_all(
    renderer: AnyRenderer, items: Iterable[tuple[Tag, Item]], processes: int
) -> Iterator[tuple[Tag, Item, Result]]:
    """Render conversations or preference records, in several processes if there are many.

    Args:
        renderer: renders each.
        items: each conversation or record, after something that belongs to it, such as its place.
        processes: the number of processes.

    Yields:
        Each item, and its tokens, or why it cannot be rendered; in the order of ``items``. An
        error of ``items`` itself is raised after the results that come before it.

    Raises:
        UserError: if a process ends before it has rendered its conversations.
    """
    if processes <= 1:
        for tag, item in items:
            yield tag, item, _rendered(renderer, item)
        return

    remaining = iter(items)
    first = _read_chunk(remaining, FEWEST_FOR_PROCESSES)
    pickled = None
    if first.error is None and len(first.entries) == FEWEST_FOR_PROCESSES:
        pickled = _pickled(renderer)
    all_items = _continued(first, remaining)
    if pickled is None:
        for tag, item in all_items:
            yield tag, item, _rendered(renderer, item)
        return

    with contextlib.closing(_Workers(pickled, processes)) as workers:
        yield from _render_chunks(renderer, workers, all_items)


def _rendered(renderer: AnyRenderer, item: Conversation | PreferenceRecord) -> Result:
    """Render one conversation or record."""
    try:
        return renderer(item)
    except BadRecord as error:
        return error


class _Chunk(NamedTuple, Generic[Tag, Item]):
    """Conversations or records, and the error that the source raised after them."""

    entries: list[tuple[Tag, Item]]
    error: Exception | None


def _read_chunk(items: Iterator[tuple[Tag, Item]], size: int) -> _Chunk[Tag, Item]:
    entries: list[tuple[Tag, Item]] = []
    try:
        entries.extend(itertools.islice(items, size))
    except Exception as error:
        return _Chunk(entries, error)
    return _Chunk(entries, None)


def _continued(
    first: _Chunk[Tag, Item], remaining: Iterator[tuple[Tag, Item]]
) -> Iterator[tuple[Tag, Item]]:
    """Yield the items of a chunk, raise its error, or else yield the remaining items."""
    yield from first.entries
    if first.error is not None:
        raise first.error
    yield from remaining


def _pickled(renderer: AnyRenderer) -> bytes | None:
    """Return a renderer for another process; ``None`` if its tokenizer cannot be sent."""
    try:
        return pickle.dumps(renderer)
    except Exception:  # a tokenizer with code of its own may raise anything
        return None


def _render_chunks(
    renderer: AnyRenderer, workers: "_Workers", items: Iterator[tuple[Tag, Item]]
) -> Iterator[tuple[Tag, Item, Result]]:
    """Render conversations or records in chunks, and yield the results in order."""
    pending: deque[tuple[_Chunk[Tag, Item], Future[list[Result] | None]]] = deque()
    is_at_end = False
    while pending or not is_at_end:
        while not is_at_end and len(pending) < _CHUNKS_PER_PROCESS * workers.count:
            chunk = _read_chunk(items, CHUNK_SIZE)
            is_at_end = len(chunk.entries) < CHUNK_SIZE
            pending.append((chunk, workers.submit([item for _, item in chunk.entries])))

        chunk, future = pending.popleft()
        results = future.result()
        if results is None:  # the process cannot render it: the error is raised here
            results = [_rendered(renderer, item) for _, item in chunk.entries]
        for (tag, item), result in zip(chunk.entries, results, strict=True):
            yield tag, item, result
        if chunk.error is not None:
            raise chunk.error


class _Worker(NamedTuple):
    """A started process, and this process's end of the connection to it."""

    process: "subprocess.Popen[bytes]"
    connection: Connection


class _Workers:
    """Processes that render chunks, with a thread for each that waits for it.

    Args:
        pickled_renderer: the renderer.
        count: the number of processes.
    """

    def __init__(self, pickled_renderer: bytes, count: int) -> None:
        self.count = count
        self._workers = [_start_worker() for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rendering")
        for worker in self._workers:
            self._threads.submit(self._send_renderer, worker, pickled_renderer)

    def submit(self, items: list[Conversation | PreferenceRecord]) -> "Future[list[Result] | None]":
        """Let a process render a chunk. The result is ``None`` if that raises an error."""
        return self._threads.submit(self._render, items)

    def close(self) -> None:
        """End all processes, also if they are rendering."""
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()

    def _send_renderer(self, worker: _Worker, pickled_renderer: bytes) -> None:
        with contextlib.suppress(OSError):  # if it has ended, its first chunk raises the error
            worker.connection.send_bytes(pickled_renderer)
        self._idle.put(worker)

    def _render(self, items: list[Conversation | PreferenceRecord]) -> list[Result] | None:
        worker = self._idle.get()
        try:
            worker.connection.send(items)
            results: list[Result] | None = worker.connection.recv()
        except (EOFError, OSError):
            raise _lost(worker.process) from None
        finally:
            self._idle.put(worker)
        return results


def _start_worker() -> _Worker:
    """Start a process that renders what it gets through a connection."""
    environment = {
        **os.environ,
        # It imports the same modules as this process.
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TOKENIZERS_PARALLELISM": "false",
    }
    connection, its_connection = multiprocessing.Pipe()
    with its_connection:
        file_descriptor = its_connection.fileno()
        process = subprocess.Popen(
            # -P keeps Python from putting the working directory before all other paths.
            [sys.executable, "-P", "-c", _COMMAND.format(file_descriptor=file_descriptor)],
            pass_fds=[file_descriptor],
            env=environment,
            # Ctrl-C and a closed terminal reach only this process, which ends the other one.
            process_group=0,
        )
    return _Worker(process, connection)


def _lost(process: "subprocess.Popen[bytes]") -> UserError:
    """Return the error for a process that ended before its work was done."""
    code = process.wait()
    reason = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            reason = signal.Signals(-code).name
    return UserError(
        f"a process that renders conversations has ended ({reason}); if the machine has too little "
        "memory for it, use fewer with --dataset_num_proc."
    )


def work(file_descriptor: int) -> None:
    """Render chunks until the connection is closed. This runs in a started process.

    The first message is the renderer, and each of the others a chunk. The answer to a chunk is its
    results, or ``None`` if it cannot be rendered here.

    Args:
        file_descriptor: this process's end of the connection.
    """
    connection = Connection(file_descriptor)
    with contextlib.suppress(EOFError, OSError):
        pickled_renderer = connection.recv_bytes()
        renderer: AnyRenderer | None = None
        while True:
            pickled_items = connection.recv_bytes()
            try:
                if renderer is None:
                    renderer = pickle.loads(pickled_renderer)
                items = pickle.loads(pickled_items)
                answer = pickle.dumps([_rendered(renderer, item) for item in items])
            except Exception:
                answer = pickle.dumps(None)
            connection.send_bytes(answer)
