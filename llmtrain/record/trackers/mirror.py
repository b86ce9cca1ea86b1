"""Feeds a tracker from the run folder, on a thread of its own."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

from llmtrain.console import note
from llmtrain.errors import first_line
from llmtrain.json_types import JsonObject
from llmtrain.record.history import TrainingClock, as_numbers, read_lines
from llmtrain.record.trackers.tracker import Position, Tracker
from llmtrain.redaction import redacted


class Mirror:
    """A tracker, and the thread that opens it, feeds it and closes it.

    ``metrics.jsonl`` is the queue between the run and the tracker. So a tracker that stalls costs
    no memory, and a tracker can be sent what it lacks when a run resumes, or extends another one.

    Args:
        tracker: the tracker.
        path: ``metrics.jsonl``, with ``samples.jsonl`` next to it.
    """

    def __init__(self, tracker: Tracker, path: Path) -> None:
        self.tracker = tracker
        self.path = path
        self.news = threading.Event()  # there is something to send, or the run ends
        self.ending = threading.Event()
        self.is_abandoned = False  # it did not open in time
        self.exit_code = 0
        self.model: Path | None = None
        self.opened: Future[None] = Future()
        self._clock = TrainingClock(tracker.run.start_times)
        self._position = Position()  # of the last entry that was read
        self._checkpoints: SimpleQueue[Path] = SimpleQueue()
        self._samples_path = path.with_name("samples.jsonl")
        self._samples: list[JsonObject] = []
        self._samples_bytes = 0  # the size of the file that they were read from
        self._sent_samples = 0
        self.thread = threading.Thread(
            target=self._run, name=f"llmtrain-{tracker.name}", daemon=True
        )
        self.thread.start()

    def wait_until_open(self, seconds: float) -> None:
        """Wait until the tracker is open. If it takes too long, it is left alone.

        Raises:
            TimeoutError: if it takes longer than this. An error of the tracker is raised, too.
        """
        done, _ = wait([self.opened], seconds)
        if not done:
            # If it opens later, nothing is sent.
            self.is_abandoned = True
            self.end(exit_code=1, model=None)
            raise TimeoutError(f"no answer in {seconds} s")
        self.opened.result()

    def send_checkpoint(self, path: Path) -> None:
        """Let the tracker have a checkpoint."""
        self._checkpoints.put(path)
        self.news.set()

    def end(self, exit_code: int, model: Path | None) -> None:
        """Let the thread send the rest and close the tracker.

        Args:
            exit_code: the exit code of the run.
            model: the folder of the finished model, if there is one.
        """
        self.exit_code = exit_code
        self.model = model
        self.ending.set()
        self.news.set()

    def _run(self) -> None:
        """Open the tracker, feed it until the run ends, and close it."""
        name = self.tracker.name
        try:
            # Trackers upload the command line.
            with mock.patch.object(sys, "argv", redacted(sys.argv)):
                self.tracker.open()
        except BaseException as error:
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)

        closing: contextlib.AbstractContextManager[None] = contextlib.suppress(Exception)
        with errors_as_notes(f"{name}: tracking stopped", "metrics.jsonl is still written"):
            self._follow()
            closing = errors_as_notes(f"closing {name}")
        self.ending.wait()
        with closing:
            self.tracker.finish(self.exit_code, self.model)

    def _follow(self) -> None:
        """Send what the run writes until it ends."""
        if self.is_abandoned:
            return
        with self.path.open("rb") as file:
            while True:
                # Check this before reading: then everything written until now is sent.
                is_ending = self.ending.is_set()

                line = file.readline()
                while line.endswith(b"\n"):
                    self._send(json.loads(line))
                    line = file.readline()
                # A last line without an end is being written: read it again later.
                file.seek(-len(line), os.SEEK_CUR)

                self._send_samples()
                self._send_checkpoints()
                if is_ending:
                    return
                self.news.wait()
                self.news.clear()

    def _send(self, entry: JsonObject) -> None:
        numbers = as_numbers(entry)
        step = int(numbers["step"])
        if step > self._position.step:
            self._send_samples()
        if "time" in numbers:
            numbers["hours"] = self._clock.hours_at(numbers["time"])
        self._position = self._position.after(step)
        self.tracker.receive(self._position, numbers)
        self.tracker.flush(self._position)

    def _send_samples(self) -> None:
        """Send the samples of the steps so far, if there are new ones.

        The run writes them after the last entry of their step and before the first of the next.
        """
        with contextlib.suppress(FileNotFoundError):
            size = self._samples_path.stat().st_size
            if size != self._samples_bytes:
                self._samples = read_lines(self._samples_path)
                self._samples_bytes = size
        due = [sample for sample in self._samples if sample["step"] <= self._position.step]
        if len(due) > self._sent_samples:
            self._sent_samples = len(due)
            with errors_as_notes(f"{self.tracker.name}: samples were not sent"):
                self.tracker.log_samples(due, self._position.step)

    def _send_checkpoints(self) -> None:
        while not self._checkpoints.empty():  # only this thread takes from it
            path = self._checkpoints.get()
            with errors_as_notes(f"{self.tracker.name}: {path.name} was not sent"):
                self.tracker.log_checkpoint(path)


@contextlib.contextmanager
def errors_as_notes(
    failure: str, assurance: str = "metrics.jsonl has everything"
) -> Iterator[None]:
    """Print a note if the block raises an error. A tracker must not stop the run.

    Args:
        failure: what has failed, the beginning of the note.
        assurance: what is not affected, the end of the note.
    """
    try:
        yield
    except Exception as error:
        note(f"{failure}: {first_line(error)}; {assurance}.")
