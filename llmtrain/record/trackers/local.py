"""Trackers that write to a folder or to a server of the user's own.

If a process is killed after an entry has been stored and before its position is recorded, the next
start sends the entry again. The tracker then has the same point twice.
"""

import threading
import time
from collections import deque
from pathlib import Path

from accelerate.tracking import GeneralTracker

from llmtrain.record.trackers.tracker import ContinuingTracker, Position, TrackedRun, plain


class TensorBoard(ContinuingTracker):
    """TensorBoard, whose files are in the run folder. It reads those of all starts as one run."""

    def _begin(self, earlier_id: str | None) -> GeneralTracker:
        print_traceback = threading.excepthook

        def print_traceback_of_others(arguments: threading.ExceptHookArgs) -> None:
            # TensorBoard's own thread keeps its error, and the next call raises it again.
            if not type(arguments.thread).__module__.startswith("tensorboard"):
                print_traceback(arguments)

        threading.excepthook = print_traceback_of_others
        return self._start("tensorboard")

    def _id_of_inner(self) -> str:
        return "tensorboard"

    def flush(self, position: Position) -> None:
        self.inner.tracker.flush()
        super().flush(position)


class MLflow(ContinuingTracker):
    """MLflow. Its environment variables say where it stores runs, and name the experiment."""

    def _begin(self, earlier_id: str | None) -> GeneralTracker:
        return self._start(self.run.project, run_id=earlier_id, run_name=self.run.name)

    def _id_of_inner(self) -> str:
        run_id: str = self.inner.tracker.info.run_id
        return run_id


class Trackio(ContinuingTracker):
    """Trackio, whose runs have no id but their name.

    Trackio sends entries on a thread of its own, so a killed process loses the newest ones. The
    next start sends those of the last seconds again.
    """

    _SENDING_SECONDS = 3.0

    def __init__(self, name: str, run: TrackedRun) -> None:
        super().__init__(name, run)
        self._sending: deque[tuple[float, Position]] = deque()  # when each position was logged

    def _begin(self, earlier_id: str | None) -> GeneralTracker:
        tracker = self._start(self.run.project, name=self._id_of_inner(), resume="allow")
        if earlier_id is not None:
            # Trackio replaces the config of the run in each start.
            tracker.store_init_configuration(plain(self.run.config))
        return tracker

    def _id_of_inner(self) -> str:
        return f"{self.run.name}-{self.run.run_id}"

    def log(self, numbers: dict[str, float]) -> None:
        # Trackio has a step and a time of its own for each entry, and reserves these names.
        values = {name: value for name, value in numbers.items() if name not in ("step", "time")}
        self.inner.log(values, step=int(numbers["step"]))

    def flush(self, position: Position) -> None:
        now = time.monotonic()
        self._sending.append((now, position))
        while self._sending[0][0] < now - self._SENDING_SECONDS:
            _, sent = self._sending.popleft()
            super().flush(sent)

    def finish(self, exit_code: int, model: Path | None) -> None:
        super().finish(exit_code, model)
        if self._sending:
            _, last = self._sending[-1]
            super().flush(last)
