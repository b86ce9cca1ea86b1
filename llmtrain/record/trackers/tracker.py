"""What a run needs from a tracker: how it is opened, fed and closed.

All methods of one tracker are called on one thread, because some trackers (MLflow) keep their
current run per thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from llmtrain.console import note
from llmtrain.errors import first_line
from llmtrain.files import read_object, write_json
from llmtrain.types import JsonObject


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run before its first log entry.

    Attributes:
        folder: the run folder.
        name: the name to show.
        run_id: identifies the run, in all its starts.
        project: the project that the run belongs to.
        config: all settings, and facts such as the number of parameters, without secrets.
        start_times: the times of all starts of this run and of those that it extends, in seconds
            since 1970.
    """

    folder: Path
    name: str
    run_id: str
    project: str = "llmtrain"
    config: JsonObject = field(default_factory=dict)
    start_times: Sequence[float] = ()


class Position(NamedTuple):
    """A log entry of a run: its step, and its number among the entries of this step, from 1.

    The steps of a file's entries never decrease, so positions are ordered as the entries are.
    """

    step: int = -1
    number: int = 0

    def after(self, step: int) -> "Position":
        """Return the position of the next entry, which has this step."""
        return Position(step, self.number + 1 if step == self.step else 1)


class Tracker:
    """A tracker that begins a run of its own in each start, and gets all entries each time.

    Subclasses know how their tracker continues a run.

    Args:
        name: the name of one of Accelerate's trackers, or of one registered with it.
        run: the run to report.

    Attributes:
        inner: Accelerate's tracker, once :meth:`open` has returned.
        url: the address of the run's page, if there is one.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self.run = run
        self.inner: GeneralTracker
        self.url = ""

    def open(self) -> None:
        """Begin a run, or continue that of an earlier start."""
        self.inner = self._start(self.run.project)
        self.inner.store_init_configuration(plain(self.run.config))

    def _start(self, project: str, **arguments: object) -> GeneralTracker:
        """Start Accelerate's tracker.

        Args:
            project: what Accelerate calls the project name.
            arguments: further arguments of the tracker.
        """
        tracker_class = LOGGER_TYPE_TO_CLASS[self.name]
        if tracker_class.requires_logging_directory:
            tracker = tracker_class(project, str(self.run.folder), **arguments)
        else:
            tracker = tracker_class(project, **arguments)
        tracker.start()
        return tracker

    def has(self, position: Position) -> bool:
        """Return whether the tracker got this entry in an earlier start."""
        return False

    def receive(self, position: Position, numbers: dict[str, float]) -> None:
        """Send a log entry, unless the tracker has it.

        Args:
            position: the position of the entry.
            numbers: its numbers by name, with ``step``.
        """
        if not self.has(position):
            self.log(numbers)

    def log(self, numbers: dict[str, float]) -> None:
        """Send a log entry: its numbers by name, with ``step``."""
        self.inner.log(numbers, step=int(numbers["step"]))

    def log_samples(self, samples: list[JsonObject], step: int) -> None:
        """Send texts by the model. The default sends none, because few trackers have tables.

        Args:
            samples: all samples of the run so far: ``step``, ``prompt`` and ``text``.
            step: the step of the last entry that was sent.
        """

    def log_checkpoint(self, path: Path) -> None:
        """Send a checkpoint. The default sends none."""

    def flush(self, position: Position) -> None:
        """Make everything until this entry durable. It is called after each entry."""

    def finish(self, exit_code: int, model: Path | None) -> None:
        """End the run.

        Args:
            exit_code: 0 if the run has ended without an error.
            model: the folder of the finished model, if the run is finished.
        """
        self.inner.finish()


class ContinuingTracker(Tracker):
    """A tracker that continues one run in all starts.

    ``trackers/NAME.json`` in the run folder has the tracker's own id of the run and the last entry
    that was sent. A run that resumes from a checkpoint repeats the steps after it; the tracker has
    those already, with the same values.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        super().__init__(name, run)
        self.path = run.folder / "trackers" / f"{name}.json"
        self.id: str | None = None
        self.sent = Position()

    def open(self) -> None:
        state = read_object(self.path)
        if state.get("id"):
            try:
                self.inner = self._begin(state["id"])
            except Exception as error:
                note(
                    f"{self.name}: the run of the earlier start cannot be continued "
                    f"({first_line(error)}), so a new one begins."
                )
            else:
                self.id = state["id"]
                self.sent = Position(state["step"], state["number"])
                return

        self.inner = self._begin(None)
        self.id = self._id_of_inner()
        self.inner.store_init_configuration(plain(self.run.config))
        self.flush(Position())

    def _begin(self, earlier_id: str | None) -> GeneralTracker:
        """Start Accelerate's tracker.

        Args:
            earlier_id: the id of the run to continue; ``None`` begins a new one.
        """
        raise NotImplementedError

    def _id_of_inner(self) -> str:
        """Return the tracker's own id of the run that has just begun."""
        raise NotImplementedError

    def has(self, position: Position) -> bool:
        return position <= self.sent

    def flush(self, position: Position) -> None:
        self.sent = max(self.sent, position)
        self.path.parent.mkdir(exist_ok=True)
        content = {"id": self.id, "step": self.sent.step, "number": self.sent.number}
        # Written very often. If the machine loses power, some entries are sent again.
        write_json(self.path, content, durable=False)


def plain(config: JsonObject) -> JsonObject:
    """Return a config whose values are numbers, strings and booleans; all others become strings."""
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value)
        for name, value in config.items()
    }
