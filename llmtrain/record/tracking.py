"""Writes metrics to ``metrics.jsonl``, and mirrors them to trackers.

The file is complete. The trackers get a copy of its entries, and may fail.
"""

import logging
import time
from pathlib import Path

from llmtrain.console import note
from llmtrain.files import append_json_line
from llmtrain.json_types import JsonObject
from llmtrain.parallel.ranks import Ranks
from llmtrain.record.trackers.local import MLflow, TensorBoard, Trackio
from llmtrain.record.trackers.mirror import Mirror, errors_as_notes
from llmtrain.record.trackers.tracker import TrackedRun, Tracker
from llmtrain.record.trackers.weights_and_biases import WeightsAndBiases, wants_model

_START_SECONDS = 120  # for a tracker to start, with all its attempts
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
        self.mirrors: list[Mirror] = []
        self.close_seconds = min(_MODEL_SECONDS, model_seconds) if wants_model() else _CLOSE_SECONDS

    def start(self, names: list[str], run: TrackedRun) -> None:
        """Open the trackers, on rank 0. A tracker that cannot be opened is left out, with a note.

        Args:
            names: the names of the trackers, such as ``wandb``.
            run: what the trackers are told about the run.
        """
        if not self.ranks.is_main:
            return

        if wants_model() and "wandb" not in names:
            note("WANDB_LOG_MODEL is set, but the model is not sent: that needs --report_to wandb.")
        logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
        self.path.touch()
        for name in names:
            mirror = Mirror(self._tracker(name, run), self.path)
            with errors_as_notes(f"{name}: tracking is off"):
                mirror.wait_until_open(_START_SECONDS)
                self.mirrors.append(mirror)
        self.ranks.accelerator.trackers = [mirror.tracker.inner for mirror in self.mirrors]

    def _tracker(self, name: str, run: TrackedRun) -> Tracker:
        """Return what feeds a tracker."""
        if name == "wandb":
            return WeightsAndBiases(name, run, self.close_seconds)
        continuing = {"tensorboard": TensorBoard, "mlflow": MLflow, "trackio": Trackio}
        return continuing.get(name, Tracker)(name, run)

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the run's pages, by the names of the trackers that have one."""
        trackers = [mirror.tracker for mirror in self.mirrors]
        return {tracker.name: tracker.url for tracker in trackers if tracker.url}

    def write(self, entry: JsonObject) -> None:
        """Write a log entry, on rank 0. This waits for no tracker.

        Args:
            entry: the metrics of the entry, and its ``step``.
        """
        if self.ranks.is_main:
            append_json_line(self.path, entry)
        self.wake()

    def wake(self) -> None:
        """Let the trackers see what is new in the run folder."""
        for mirror in self.mirrors:
            mirror.news.set()

    def send_checkpoint(self, path: Path) -> None:
        """Let the trackers have a checkpoint that was just saved."""
        for mirror in self.mirrors:
            mirror.send_checkpoint(path)

    def close(self, exit_code: int, model: Path | None = None) -> None:
        """Send the rest of the entries, and end the trackers' runs.

        A tracker that takes too long is abandoned, with a note.

        Args:
            exit_code: the exit code of the run, for W&B to show.
            model: the finished model. It is sent to W&B if ``WANDB_LOG_MODEL`` says so.
        """
        for mirror in self.mirrors:
            mirror.end(exit_code, model)

        deadline = time.monotonic() + self.close_seconds
        for mirror in self.mirrors:
            mirror.thread.join(max(0.0, deadline - time.monotonic()))
            if mirror.thread.is_alive():
                note(
                    f"{mirror.tracker.name}: no answer in {self.close_seconds} s, so it is "
                    "abandoned; metrics.jsonl has everything."
                )
        self.mirrors = []
        self.ranks.accelerator.trackers = []
