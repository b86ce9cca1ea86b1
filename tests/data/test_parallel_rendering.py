"""Conversations that are rendered in several processes are those of one process, in order."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data import parallel_rendering
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation, preference_of
from llmtrain.data.messages import BadRecord
from llmtrain.data.parallel_rendering import render_all
from llmtrain.data.prompt_completion import PromptCompletionRenderer
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import Rendered
from llmtrain.errors import UserError
from tests.data.chats import QWEN3, USER, chat, make
from tests.data.test_shortcuts import assert_same, random_conversation
from tests.launching import ROOT

BAD = chat("a\ud83d", "b")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_rendering, "FEWEST_FOR_PROCESSES", 30)
    monkeypatch.setattr(parallel_rendering, "CHUNK_SIZE", 7)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that a test starts."""
    processes: list[Any] = []
    start = parallel_rendering._start_worker

    def start_and_keep() -> Any:
        worker = start()
        processes.append(worker.process)
        return worker

    monkeypatch.setattr(parallel_rendering, "_start_worker", start_and_keep)
    return processes


def renderer() -> Renderer:
    tokenizer = make()
    set_template(tokenizer, "chatml")
    return Renderer(tokenizer, only_last_turns=True)


def chats(count: int) -> list[tuple[str, Any]]:
    generator = random.Random(count)
    return [(f"line {i}", random_conversation(generator)) for i in range(count)]


def compared(result: Rendered | BadRecord) -> Rendered | str:
    return result if isinstance(result, Rendered) else str(result)


def assert_all_ended(processes: list[Any]) -> None:
    assert all(process.returncode is not None for process in processes)
    assert not [thread for thread in threading.enumerate() if "rendering" in thread.name]


def test_the_results_are_those_of_one_process_in_order(started: list[Any]) -> None:
    items = [*chats(60), ("bad", BAD), *chats(8)]
    wanted = list(render_all(renderer(), iter(items), processes=1))
    assert started == []
    results = list(render_all(renderer(), iter(items), processes=2))
    assert len(started) == 2
    assert [(place, item) for place, item, _ in results] == items
    for (_, _, result), (_, _, expected) in zip(results, wanted, strict=True):
        assert type(result) is type(expected)
        assert_same(compared(result), compared(expected))
    assert any(isinstance(result, BadRecord) for _, _, result in results)
    assert_all_ended(started)


@pytest.mark.parametrize(("first", "safe_path"), [(str(ROOT), ""), ("", "1")])
def test_a_process_uses_the_package_of_the_one_that_started_it(
    started: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    safe_path: str,
) -> None:
    (tmp_path / "llmtrain").mkdir()
    (tmp_path / "llmtrain" / "__init__.py").write_text("raise SystemExit('another package')")
    # An empty path is the working directory, as in a notebook.
    monkeypatch.chdir(tmp_path if first else ROOT)
    monkeypatch.setattr(sys, "path", [first, str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    assert len(list(render_all(renderer(), iter(chats(40)), processes=2))) == 40
    assert len(started) == 2


def test_few_conversations_start_nothing(started: list[Any]) -> None:
    assert len(list(render_all(renderer(), iter(chats(29)), processes=2))) == 29
    assert list(render_all(renderer(), iter([]), processes=2)) == []
    assert started == []


def test_records_of_preference_data_and_plain_text_are_rendered_too(started: list[Any]) -> None:
    record = preference_of({"prompt": "a", "chosen": "b", "rejected": "c"})
    for maker in (renderer(), PromptCompletionRenderer(make())):
        results = list(render_all(maker, [("line", record)] * 30, processes=2))
        for _, _, result in results:
            assert_same(compared(result), maker(record))
    assert len(started) == 4
    assert_all_ended(started)


def test_an_error_of_the_source_comes_after_the_results_before_it(started: list[Any]) -> None:
    def failing(count: int) -> Iterator[tuple[str, Any]]:
        yield from chats(count)
        raise UserError("line 40 is not JSON")

    for count in (40, 10):
        results = render_all(renderer(), failing(count), processes=2)
        places = [place for place, _, _ in itertools.islice(results, count)]
        assert places == [f"line {i}" for i in range(count)]
        with pytest.raises(UserError, match="line 40 is not JSON"):
            next(results)
    assert_all_ended(started)


def test_an_error_in_a_process_is_raised_here(started: list[Any]) -> None:
    wrong = Conversation([USER, {"role": "assistant"}], None)  # without content
    items = [*chats(40), ("wrong", wrong), *chats(40)]
    with pytest.raises(KeyError, match="content"):
        list(render_all(renderer(), items, processes=1))
    with pytest.raises(KeyError, match="content"):
        list(render_all(renderer(), items, processes=2))
    assert_all_ended(started)


def test_a_process_that_is_killed_is_one_line_and_no_hang(started: list[Any]) -> None:
    results = render_all(renderer(), iter(chats(100)), processes=2)
    next(results)
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"has ended \(SIGKILL\).*--dataset_num_proc") as caught:
        list(results)
    assert "\n" not in str(caught.value)
    assert_all_ended(started)


def test_a_consumer_that_stops_ends_all_processes(started: list[Any]) -> None:
    results = render_all(renderer(), iter(chats(100)), processes=2)
    next(results)
    results.close()
    assert_all_ended(started)


def test_ctrl_c_ends_all_processes(started: list[Any]) -> None:
    def interrupted() -> Iterator[tuple[str, Any]]:
        yield from chats(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(render_all(renderer(), interrupted(), processes=2))
    assert_all_ended(started)


# It has no main guard: if the processes ran it again, each would start others.
SCRIPT = """
import time
from llmtrain.data import parallel_rendering
from tests.data.test_parallel_rendering import chats, renderer
parallel_rendering.FEWEST_FOR_PROCESSES, parallel_rendering.CHUNK_SIZE = 30, 7
processes = []
start = parallel_rendering._start_worker
def start_and_keep():
    processes.append(start())
    return processes[-1]
parallel_rendering._start_worker = start_and_keep
results = parallel_rendering.render_all(renderer(), iter(chats(60)), 2)
next(results)
print(*(worker.process.pid for worker in processes), flush=True)
time.sleep(600)
"""


def test_the_processes_of_a_script_without_a_main_guard_end_when_it_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as script:
        assert script.stdout is not None
        ids = [int(word) for word in script.stdout.readline().split()]
        assert len(ids) == 2
        assert all(map(is_running, ids))
        script.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, ids))


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


class Unsendable(Renderer):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


class Unloadable(Renderer):
    def __reduce__(self) -> Any:
        return int, ("not a renderer",)


@pytest.mark.parametrize(("kind", "processes"), [(Unsendable, 0), (Unloadable, 2)])
def test_a_renderer_that_works_in_no_other_process_is_used_here(
    started: list[Any], kind: type[Renderer], processes: int
) -> None:
    results = list(render_all(kind(make(QWEN3)), iter(chats(40)), processes=2))
    assert [place for place, _, _ in results] == [f"line {i}" for i in range(40)]
    assert len(started) == processes
    assert_all_ended(started)
