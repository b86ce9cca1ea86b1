"""Render conversations in several processes, in their order.

The processes are started by ``subprocess`` and not by ``multiprocessing``, which would run the
user's script again in each of them. Each gets the renderer once, then chunks of conversations
through its standard input, and ends when that is closed. So none outlives the process that started
it, even if that one is killed.
"""

import contextlib
import itertools
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Generic, NamedTuple, TypeAlias, TypeVar

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.prompt_completion import AnyRenderer
from llmtrain.data.rendered import Rendered
from llmtrain.errors import UserError

Item = TypeVar("Item", bound=Conversation | PreferenceRecord)
Tag = TypeVar("Tag")
Result: TypeAlias = Rendered | BadRecord

# Fewer conversations take less time than the start of a process.
FEWEST_FOR_PROCESSES = 2_000
CHUNK_SIZE = 200  # conversations
_CHUNKS_PER_PROCESS = 3  # that wait, are rendered or have been rendered
_LENGTH = struct.Struct("<Q")  # comes before each message between processes
_COMMAND = "from llmtrain.data.parallel_rendering import work; work()"


def render_all(
    renderer: AnyRenderer, items: Iterable[tuple[Tag, Item]], processes: int
) -> Iterator[tuple[Tag, Item, Result]]:
    """Render conversations or preference records, in several processes if there are many.

    Args:
        renderer: renders each.
        items: each conversation or record, after something that belongs to it, such as its place.
        processes: the number of processes.

    Yields:
        Each item, and its documents, or why it cannot be rendered; in the order of ``items``. An
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
    if pickled is None:
        for tag, item in itertools.chain(first.entries, _raised(first.error), remaining):
            yield tag, item, _rendered(renderer, item)
        return

    with contextlib.closing(_Workers(pickled, processes)) as workers:
        yield from _render_chunks(workers, itertools.chain(first.entries, remaining))


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


def _raised(error: Exception | None) -> Iterator[Any]:
    """Yield nothing, and raise an error if there is one."""
    yield from ()
    if error is not None:
        raise error


def _pickled(renderer: AnyRenderer) -> bytes | None:
    """Return a renderer for another process; ``None`` if its tokenizer cannot be sent."""
    try:
        return pickle.dumps(renderer)
    except Exception:  # a tokenizer with code of its own may raise anything
        return None


def _render_chunks(
    workers: "_Workers", items: Iterator[tuple[Tag, Item]]
) -> Iterator[tuple[Tag, Item, Result]]:
    """Render conversations or records in chunks, and yield the results in order."""
    pending: deque[tuple[_Chunk[Tag, Item], Future[list[Result]]]] = deque()
    is_at_end = False
    while pending or not is_at_end:
        while not is_at_end and len(pending) < _CHUNKS_PER_PROCESS * workers.count:
            chunk = _read_chunk(items, CHUNK_SIZE)
            is_at_end = len(chunk.entries) < CHUNK_SIZE
            pending.append((chunk, workers.submit([item for _, item in chunk.entries])))

        if pending:
            chunk, future = pending.popleft()
            for (tag, item), result in zip(chunk.entries, future.result(), strict=True):
                yield tag, item, result
            if chunk.error is not None:
                raise chunk.error


class _Workers:
    """Processes that render chunks, with a thread for each that waits for it.

    Args:
        pickled_renderer: the renderer.
        count: the number of processes.
    """

    def __init__(self, pickled_renderer: bytes, count: int) -> None:
        self.count = count
        self._processes = [_start_process() for _ in range(count)]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._pickled_renderer = pickled_renderer
        self._ready: set[int] = set()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rendering")

    def submit(self, items: list[Conversation | PreferenceRecord]) -> "Future[list[Result]]":
        """Let a process render a chunk."""
        return self._threads.submit(self._render, items)

    def close(self) -> None:
        """End all processes, also if they are rendering."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError), process:
                pass  # closes its pipes and waits for its end
            process.wait()

    def _render(self, items: list[Conversation | PreferenceRecord]) -> list[Result]:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.pid not in self._ready:
                _send(process.stdin, self._pickled_renderer)
                self._ready.add(process.pid)
            _send(process.stdin, pickle.dumps(items))
            answer = pickle.loads(_receive(process.stdout))
        except (EOFError, OSError):
            raise _lost(process) from None
        finally:
            self._idle.put(process)
        if isinstance(answer, BaseException):
            raise answer
        results: list[Result] = answer
        return results


def _start_process() -> "subprocess.Popen[bytes]":
    """Start a process that renders what it gets through its standard input."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        # -P keeps the working directory, which may hold anything, out of sys.path.
        [sys.executable, "-P", "-c", _COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


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


def work() -> None:
    """Render chunks from standard input until it is closed. This runs in a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    requests = sys.stdin.buffer
    # Nothing that prints may disturb the results.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    with contextlib.suppress(EOFError, BrokenPipeError):
        error: Exception | None = None
        message = _receive(requests)
        try:
            renderer: AnyRenderer = pickle.loads(message)
        except Exception as loading_error:
            error = loading_error
        while True:
            items = pickle.loads(_receive(requests))
            if error is None:
                try:
                    _send(answers, pickle.dumps([_rendered(renderer, item) for item in items]))
                    continue
                except Exception as rendering_error:
                    error = rendering_error
            _send(answers, _pickled_error(error))


def _pickled_error(error: Exception) -> bytes:
    """Return an error for another process. An error that cannot be sent becomes its text."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """Return the next message.

    Raises:
        EOFError: if the other process has closed the pipe.
    """
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    message = pipe.read(length)
    if len(message) < length:
        raise EOFError
    return message
