"""A tracker of Accelerate, and the thread that feeds it from the run folder."""

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from llmtrain.console import note
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, read_object, write_json
from llmtrain.record.history import as_numbers
from llmtrain.redaction import redacted


def check_trackers(names: list[str]) -> None:
    """Check the values of ``--report_to``.

    Raises:
        UserError: if a tracker is unknown or not installed, or if the values contradict each other.
    """
    if "none" in names and len(names) > 1:
        raise UserError(
            f"--report_to {' '.join(names)}: none contradicts the others; leave one of them out."
        )
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in ("auto", "none", *LOGGER_TYPE_TO_CLASS):
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"--report_to {name} is not known: use auto, {known} or none.")
        if name in LoggerType.list() and name not in available:
            raise UserError(f"--report_to {name} is not installed: pip install {name}.")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run before its first log entry.

    Attributes:
        folder: the run folder.
        name: the name to show.
        run_id: identifies the run, in all its starts.
        project: the project that the run belongs to.
        config: all settings, and facts such as the number of parameters, without secrets.
    """

    folder: Path
    name: str
    run_id: str
    project: str = "llmtrain"
    config: JsonObject = field(default_factory=dict)


class Tracker:
    """A tracker, and the thread that opens it, sends it each step once, and closes it.

    ``metrics.jsonl`` is the queue between the run and the tracker, so a tracker that stalls costs
    no memory and holds up nothing. ``trackers/NAME.json`` in the run folder has the last step that
    was sent, and the next start sends only later ones.

    Everything is done on one thread, because some trackers (MLflow) keep their current run per
    thread.

    Args:
        name: the name of one of Accelerate's trackers, or of one registered with it.
        run: the run to report.

    Attributes:
        inner: Accelerate's tracker, once it is open.
        id: MLflow's own id of the run.
        url: the address of the run's page, if there is one.
        sent_step: the last step that the tracker has got.
        opened: set when the tracker is open, or has failed to open.
        news: set when there is something to send, or the run ends.
        exit_code: the exit code of the run, once it ends.
        model: the folder of the finished model, if the run ends with one.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self.run = run
        self.state_path = run.folder / "trackers" / f"{name}.json"
        self.inner: GeneralTracker
        self.id: str | None = None
        self.url = ""
        self.sent_step = -1
        self.opened = threading.Event()
        self.news = threading.Event()
        self.exit_code: int | None = None
        self.model: Path | None = None
        self.thread = threading.Thread(target=self._run, name=f"llmtrain-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Open the tracker, send it what the run writes until it ends, and close it."""
        try:
            # Trackers upload the command line.
            with mock.patch.object(sys, "argv", redacted(sys.argv)):
                self.open()
            self.opened.set()
            self._follow()
            self.close()
        except Exception as error:
            failure = f"{self.name}: tracking stopped: {first_line(error)}"
            note(f"{failure}; metrics.jsonl has everything.")
        finally:
            self.opened.set()

    def open(self) -> None:
        """Begin a run, or continue that of the earlier starts if the tracker can do that."""
        state = read_object(self.state_path)
        self.sent_step = -1 if state.get("step") is None else state["step"]
        arguments: dict[str, JsonObject] = {
            # TensorBoard drops what a start sent of the next step before it was killed.
            "tensorboard": {"purge_step": self.sent_step + 1},
            "mlflow": {"run_id": state.get("id"), "run_name": self.run.name},
            "trackio": {"name": f"{self.run.name}-{self.run.run_id}", "resume": "allow"},
        }
        self.inner = self.start(**arguments.get(self.name, {}))

        if self.name == "mlflow":
            mlflow_run = self.inner.tracker
            self.id = mlflow_run.info.run_id
            # It may have got one more step, right before a kill.
            last_step = int(mlflow_run.data.metrics.get("step", -1))
            self.sent_step = max(self.sent_step, last_step)
        if not state or self.name not in ("tensorboard", "mlflow"):
            config = {
                name: value if isinstance(value, int | float | str | bool) else str(value)
                for name, value in self.run.config.items()
            }
            self.inner.store_init_configuration(config)
        self._write_state()

    def start(self, **arguments: object) -> GeneralTracker:
        """Start Accelerate's tracker, with these arguments of its class."""
        tracker_class = LOGGER_TYPE_TO_CLASS[self.name]
        if tracker_class.requires_logging_directory:
            tracker = tracker_class(self.name, str(self.run.folder), **arguments)
        else:
            tracker = tracker_class(self.run.project, **arguments)
        tracker.start()
        return tracker

    def _follow(self) -> None:
        """Send each step when the next one begins, and the last one when the run ends.

        A step may have several log entries: of its training, and of the evaluation after it.
        """
        for step, entries in itertools.groupby(self._entries(), lambda entry: entry["step"]):
            numbers: dict[str, float] = {}
            for entry in entries:
                numbers |= as_numbers(entry)
            self.send(step, numbers)

    def _entries(self) -> Iterator[JsonObject]:
        """Yield the log entries of the run until it ends, beginning with those that it has."""
        with (self.run.folder / "metrics.jsonl").open("rb") as file:
            while True:
                # Check this before reading: then everything written until now is sent.
                is_ending = self.exit_code is not None
                line = file.readline()
                if line.endswith(b"\n"):
                    yield json.loads(line)
                elif is_ending:
                    return
                else:
                    # A line without an end is being written: read it again later.
                    file.seek(-len(line), os.SEEK_CUR)
                    self.news.wait()
                    self.news.clear()

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """Send a step, unless the tracker has it.

        Args:
            step: the step.
            numbers: all numbers of its log entries, by name.
        """
        if step > self.sent_step:
            self.inner.log(numbers, step=step)
            self.sent_step = step
            self._write_state()

    def close(self) -> None:
        """End the run of the tracker."""
        self.inner.finish()

    def _write_state(self) -> None:
        self.state_path.parent.mkdir(exist_ok=True)
        # Written very often. If the machine loses power, some steps are sent again.
        write_json(self.state_path, {"id": self.id, "step": self.sent_step}, durable=False)
