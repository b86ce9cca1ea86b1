"""Rendering in several processes: the results and errors of one process, and no process is left."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llmtrain.data import parallel_rendering
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import preference_of
from llmtrain.data.messages import BadRecord
from llmtrain.data.parallel_rendering import render_all
from llmtrain.data.prompt_completion import PromptCompletionRenderer
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import Rendered
from llmtrain.errors import UserError
from tests.data.chats import assert_same_rendering, chat, make
from tests.data.random_conversations import random_conversation
from tests.launching import ROOT, long_form

PREFERENCE = preference_of({"prompt": "a", "chosen": "b", "rejected": "c"})

Processes = list["subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_rendering, "FEWEST_FOR_PROCESSES", 30)
    monkeypatch.setattr(parallel_rendering, "CHUNK_SIZE", 7)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """The processes that a test starts."""
    processes: Processes = []
    start_worker = parallel_rendering._start_worker

    def start_and_remember() -> Any:
        worker = start_worker()
        processes.append(worker.process)
        return worker

    monkeypatch.setattr(parallel_rendering, "_start_worker", start_and_remember)
    return processes


def renderer() -> Renderer:
    tokenizer = make()
    set_template(tokenizer, "chatml")
    return Renderer(tokenizer, only_last_turns=True)


def chats(count: int) -> list[tuple[str, Any]]:
    """Return conversations after their places."""
    generator = random.Random(count)
    return [(f"line {i}", random_conversation(generator)) for i in range(count)]


def assert_same_result(result: Rendered | BadRecord, expected: Rendered | BadRecord) -> None:
    """Check that two results are equal, or are errors with the same message."""
    assert type(result) is type(expected)
    if isinstance(result, BadRecord):
        assert str(result) == str(expected)
    else:
        assert_same_rendering(result, expected)


def assert_all_ended(processes: Processes) -> None:
    """Check that neither processes nor the threads that wait for them are left."""
    assert all(process.returncode is not None for process in processes)
    assert not [thread for thread in threading.enumerate() if "rendering" in thread.name]


# --- results


def test_several_processes_give_the_results_of_one_in_the_same_order(started):
    bad = chat("a\ud83d", "b")
    items = [*chats(60), ("bad", bad), ("preference", PREFERENCE), *chats(8)]

    serial = list(render_all(renderer(), iter(items), processes=1))
    assert started == []
    parallel = list(render_all(renderer(), iter(items), processes=2))
    assert len(started) == 2

    assert [(place, item) for place, item, _ in parallel] == items
    for (_, _, result), (_, _, expected) in zip(parallel, serial, strict=True):
        assert_same_result(result, expected)
    _, _, bad_result = parallel[60]
    assert isinstance(bad_result, BadRecord)
    assert_all_ended(started)


def test_few_conversations_start_no_process(started):
    assert list(render_all(renderer(), iter([]), processes=2)) == []
    assert len(list(render_all(renderer(), iter(chats(29)), processes=2))) == 29
    assert started == []


class CannotBeSent(PromptCompletionRenderer):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


class CannotBeLoaded(PromptCompletionRenderer):
    def __reduce__(self) -> Any:
        return int, ("not a renderer",)


@pytest.mark.parametrize(
    ("renderer_type", "process_count"),
    [(PromptCompletionRenderer, 2), (CannotBeSent, 0), (CannotBeLoaded, 2)],
)
def test_plain_text_is_rendered_in_this_process_if_others_cannot(
    started, renderer_type, process_count
):
    plain_text = renderer_type(make())
    results = list(render_all(plain_text, [("line", PREFERENCE)] * 40, processes=2))

    assert len(results) == 40
    for _, _, result in results:
        assert_same_result(result, plain_text(PREFERENCE))
    assert len(started) == process_count
    assert_all_ended(started)


@pytest.mark.parametrize("is_notebook", [False, pytest.param(True, marks=long_form)])
def test_a_process_imports_the_same_package_as_the_one_that_started_it(
    started, tmp_path, monkeypatch, is_notebook
):
    wrong_package = tmp_path / "llmtrain"
    wrong_package.mkdir()
    (wrong_package / "__init__.py").write_text("raise SystemExit('another package')")
    # A notebook has an empty path, which is the working directory.
    monkeypatch.chdir(ROOT if is_notebook else tmp_path)
    monkeypatch.setattr(sys, "path", ["" if is_notebook else str(ROOT), str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONSAFEPATH", "1" if is_notebook else "")

    assert len(list(render_all(renderer(), iter(chats(40)), processes=2))) == 40
    assert len(started) == 2


# --- errors and interruptions


def failing_source(count: int) -> Iterator[tuple[str, Any]]:
    """Yield some conversations, and raise an error."""
    yield from chats(count)
    raise UserError("the next line is not JSON")


@pytest.mark.parametrize("count", [10, 40], ids=["before-processes-start", "after-that"])
def test_an_error_of_the_source_comes_after_the_results_before_it(started, count):
    results = render_all(renderer(), failing_source(count), processes=2)

    places = [place for place, _, _ in itertools.islice(results, count)]
    assert places == [f"line {i}" for i in range(count)]
    with pytest.raises(UserError, match="the next line is not JSON"):
        next(results)
    assert len(started) == (2 if count >= 30 else 0)
    assert_all_ended(started)


def test_a_killed_process_is_an_error_of_one_line(started):
    results = render_all(renderer(), iter(chats(100)), processes=2)
    next(results)
    process_ids = [process.pid for process in started]
    # A terminal sends Ctrl-C to the group of this process alone.
    assert [os.getpgid(process_id) for process_id in process_ids] == process_ids

    for process in started:
        os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(UserError, match=r"has ended \(SIGKILL\).*--dataset_num_proc") as lost:
        list(results)
    assert "\n" not in str(lost.value)
    assert_all_ended(started)


def test_a_process_ends_when_the_one_that_started_it_is_gone():
    workers = [parallel_rendering._start_worker() for _ in range(2)]
    for worker in workers:  # the system closes the connections of a killed process
        assert worker.process.poll() is None
        worker.connection.close()
        assert worker.process.wait(timeout=60) == 0
