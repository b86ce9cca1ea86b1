"""Rendering in several processes: the results and errors of one process, and no process is left."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.data import rendering_pool
from llmtrain.data.formats import preference_of
from llmtrain.data.messages import BadRecord
from llmtrain.data.records import ReadRecord
from llmtrain.data.render import PromptCompletionRenderer, Rendered, Renderer
from llmtrain.data.rendering_pool import render_all
from llmtrain.data.tokenizer import set_template
from llmtrain.errors import UserError
from tests.data.chats import assert_same_rendering, chat, make
from tests.data.random_conversations import random_conversation
from tests.launching import ROOT

PREFERENCE = ReadRecord(0, "line", preference_of({"prompt": "a", "chosen": "b", "rejected": "c"}))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks processes")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering_pool, "FEWEST_FOR_PROCESSES", 30)
    monkeypatch.setattr(rendering_pool, "CHUNK_SIZE", 7)


def children() -> set[int]:
    """Return the ids of the processes that this process has started, and that have not ended."""
    return {child.pid for child in psutil.Process().children()}


def renderer() -> Renderer:
    tokenizer = make()
    set_template(tokenizer, "chatml")
    return Renderer(tokenizer, only_last_turns=True)


def chats(count: int) -> list[ReadRecord[Any]]:
    generator = random.Random(count)
    return [ReadRecord(i, f"line {i}", random_conversation(generator)) for i in range(count)]


def assert_same_result(result: Rendered | BadRecord, expected: Rendered | BadRecord) -> None:
    """Check that two results are equal, or are errors with the same message."""
    assert type(result) is type(expected)
    if isinstance(result, BadRecord):
        assert str(result) == str(expected)
    else:
        assert_same_rendering(result, expected)


# --- results


def test_several_processes_give_the_results_of_one_in_the_same_order():
    items = [*chats(60), ReadRecord(60, "bad", chat("a\ud83d", "b")), PREFERENCE, *chats(8)]
    before = children()

    serial = list(render_all(renderer(), iter(items), processes=1))
    parallel = render_all(renderer(), iter(items), processes=2)
    first = next(parallel)
    assert len(children() - before) == 2
    results = [first, *parallel]

    assert [read for read, _ in results] == items
    for (_, result), (_, expected) in zip(results, serial, strict=True):
        assert_same_result(result, expected)
    _, bad_result = results[60]
    assert isinstance(bad_result, BadRecord)
    assert not children() - before


def test_few_conversations_start_no_process():
    before = children()
    assert list(render_all(renderer(), iter([]), processes=2)) == []
    results = render_all(renderer(), iter(chats(29)), processes=2)
    next(results)
    assert not children() - before
    assert len(list(results)) == 28


class CannotBeSent(PromptCompletionRenderer):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


def test_a_renderer_need_not_be_sent_to_other_processes():
    plain_text = CannotBeSent(make())
    results = list(render_all(plain_text, [PREFERENCE] * 40, processes=2))

    assert len(results) == 40
    for _, result in results:
        assert_same_result(result, plain_text(PREFERENCE.record))


# --- errors and interruptions


def failing_source(count: int) -> Iterator[ReadRecord[Any]]:
    """Yield some conversations, and raise an error."""
    yield from chats(count)
    raise UserError("the next line is not JSON")


@pytest.mark.parametrize("count", [10, 40], ids=["before-processes-start", "after-that"])
def test_an_error_of_the_source_ends_all_processes(count):
    before = children()
    with pytest.raises(UserError, match="the next line is not JSON"):
        list(render_all(renderer(), failing_source(count), processes=2))
    assert not children() - before


def test_a_killed_process_is_an_error_of_one_line():
    before = children()
    results = render_all(renderer(), iter(chats(100)), processes=2)
    next(results)
    process_ids = list(children() - before)
    # A terminal sends Ctrl-C to the group of this process alone.
    deadline = time.monotonic() + 60
    while [os.getpgid(process_id) for process_id in process_ids] != process_ids:
        assert time.monotonic() < deadline  # the second process may only just have begun
        time.sleep(0.01)

    os.kill(process_ids[0], signal.SIGKILL)

    with pytest.raises(UserError, match=r"has ended.*--dataset_num_proc") as lost:
        list(results)
    assert "\n" not in str(lost.value)
    assert not children() - before


RENDERS_AND_WAITS = """
import itertools, sys, time
from tests.data.test_rendering_pool import PREFERENCE, children, make, rendering_pool
from llmtrain.data.render import PromptCompletionRenderer
rendering_pool.FEWEST_FOR_PROCESSES = 30
items = itertools.repeat(PREFERENCE)
next(rendering_pool.render_all(PromptCompletionRenderer(make()), items, processes=2))
results = rendering_pool.render_all(PromptCompletionRenderer(make()), items, processes=2)
next(results)
print(*children(), flush=True)
time.sleep(600)
"""


def test_processes_end_when_the_one_that_forked_them_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", RENDERS_AND_WAITS], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process_ids = [int(id) for id in process.stdout.readline().split()]
        process.kill()

    assert len(process_ids) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{id}").exists() for id in process_ids):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
