"""Writes metrics to ``metrics.jsonl``, and lets trackers follow the file.

The file is complete. The trackers get a copy of its entries, and may fail.
"""

import time
from pathlib import Path

from llmtrain.console import note
from llmtrain.files import JsonObject, append_json_line
from llmtrain.parallel.ranks import Ranks
from llmtrain.record.trackers.tracker import TrackedRun, Tracker
from llmtrain.record.trackers.weights_and_biases import (
    WeightsAndBiases,
    is_wanted,
    wants_model,
)

_START_SECONDS = 120  # for a tracker to start
_CLOSE_SECONDS = 60  # for all trackers to end
_MODEL_SECONDS = 1500  # for all trackers to end, if W&B is also sent the model


class MetricsLog:
    """Writes ``metrics.jsonl``, a line for each log entry. Every rank uses it; rank 0 writes.

    The trackers follow the file at their own pace, each on a separate thread. Training never waits
    for them.

    Args:
        ranks: the ranks of the run.
        folder: the run folder.
        model_seconds: the longest time for sending the model, while the other ranks wait.
    """

    def __init__(self, ranks: Ranks, folder: Path, model_seconds: float = _MODEL_SECONDS) -> None:
        self.ranks = ranks
        self.path = folder / "metrics.jsonl"
        self.trackers: list[Tracker] = []
        self.close_seconds = min(_MODEL_SECONDS, model_seconds) if wants_model() else _CLOSE_SECONDS

    def start(self, names: list[str], run: TrackedRun) -> None:
        """Open the trackers, on rank 0. One that takes too long opens while the run goes on.

        Args:
            names: the names of the trackers, such as ``wandb``; ``auto`` is W&B if it is wanted.
            run: what the trackers are told about the run.
        """
        if not self.ranks.is_main:
            return

        self.path.touch()
        if "auto" in names:
            others = [name for name in names if name not in ("auto", "wandb")]
            names = [*others, "wandb"] if "wandb" in names or is_wanted(run.folder) else others
        for name in names:
            tracker = WeightsAndBiases(name, run) if name == "wandb" else Tracker(name, run)
            self.trackers.append(tracker)
            if not tracker.opened.wait(_START_SECONDS):
                note(f"{name}: no answer in {_START_SECONDS} s; it gets all entries later.")

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the run's pages, by the names of the trackers that have one."""
        return {tracker.name: tracker.url for tracker in self.trackers if tracker.url}

    def write(self, entry: JsonObject) -> None:
        """Write a log entry, on rank 0. This waits for no tracker.

        Args:
            entry: the metrics of the entry, its ``step`` and its ``time``.
        """
        if self.ranks.is_main:
            append_json_line(self.path, entry)
        for tracker in self.trackers:
            tracker.news.set()

    def close(self, exit_code: int, model: Path | None = None) -> None:
        """Send the rest of the entries, and end the trackers' runs.

        A tracker that takes too long is abandoned, with a note.

        Args:
            exit_code: the exit code of the run, for W&B to show.
            model: the finished model. It is sent to W&B if ``WANDB_LOG_MODEL`` says so.
        """
        for tracker in self.trackers:
            # Its thread sends the rest, closes the tracker and ends.
            tracker.model = model
            tracker.exit_code = exit_code
            tracker.news.set()

        deadline = time.monotonic() + self.close_seconds
        for tracker in self.trackers:
            tracker.thread.join(max(0.0, deadline - time.monotonic()))
            if tracker.thread.is_alive():
                note(
                    f"{tracker.name}: no answer in {self.close_seconds} s, so it is abandoned; "
                    "metrics.jsonl has everything."
                )
        self.trackers = []
