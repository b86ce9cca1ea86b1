"""An x-ray of some updates: what each process does when, and which bucket of gradients travels meanwhile."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from llmtrain.console import say
from llmtrain.files import json_text
from llmtrain.observe.phases import PHASES, Phases
from llmtrain.observe.timeline import Bucket, Report, Sent, Span, as_facts, as_html, as_lines, as_trace

_ROUNDS = 9  # in which the machines' clocks are compared


class XRay:
    """Records the updates in ``steps`` (the first is 1); after the last of them ``report`` is there on the main
    process, and, where there is a ``folder``, as files in it.

    Its :meth:`bucket` is to be called for every bucket of gradients that is full.
    """

    def __init__(
        self, accelerator: Accelerator, phases: Phases, model: nn.Module, steps: range, folder: Path | None = None
    ) -> None:
        self.accelerator, self.phases, self.steps, self.folder = accelerator, phases, steps, folder
        self.clock: Any = phases.clock
        self.names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
        self.recording = False
        self.cost = 0.0  # seconds that recording itself took
        self.marks: list[tuple[str, int, int, Any]] = []  # phase, update, micro-batch, when it began
        self.sent: list[dict[str, Any]] = []
        self.buckets: dict[int, Bucket] = {}
        self.update = self.micro_batch = -1
        self.report: Report | None = None
        phases.on_change.append(self._at)

    def between(self, step: int) -> None:
        """``step`` updates are made and the next is not begun: all processes call this, before the first update too."""
        if step + 1 == self.steps.start:
            self.offset = _offset_of_this_clock(self.accelerator)
            self.bytes_before = _bytes_sent(self.accelerator)
            self.zero = self.clock.zero()
            self.recording = True
        elif self.recording and step == self.steps[-1]:
            self.phases.at("other")  # which ends what was before
            self.recording = False
            self._leave_report(_bytes_sent(self.accelerator) - self.bytes_before)

    def bucket(self, bucket: Any, send: Callable[[Any], Any], sent_bytes: int) -> Any:
        """Send a bucket that is full, and note how that goes."""
        if not self.recording or self.phases.phase == "getting ready":
            return send(bucket)
        began = time.perf_counter()
        number = bucket.index()
        names = [self.names.get(parameter, "?") for parameter in bucket.parameters()]
        self.buckets[number] = Bucket(bucket.buffer().nbytes, names)  # DDP makes others after the first update
        note: dict[str, Any] = {"bucket": number, "update": self.update, "micro_batch": self.micro_batch}
        note |= {"sent_bytes": sent_bytes, "ready": self.clock.now()}
        self.sent.append(note)
        sending = time.perf_counter()
        future = send(bucket)
        taken = time.perf_counter() - sending
        note["blocked"] = 0.0 if self.clock.queues else taken
        future = future.then(lambda done: self._arrived(note, done))
        self.cost += time.perf_counter() - began - taken
        return future

    def _arrived(self, note: dict[str, Any], done: Any) -> torch.Tensor:
        note["ended"] = self.clock.now()
        return done.value()

    def _at(self, phase: str, mark: Any) -> None:
        if not self.recording:
            return
        began = time.perf_counter()
        if phase == "data":
            self.update, self.micro_batch = self.phases.step + 1, -1
        self.micro_batch += phase == "forward"
        self.marks.append((phase, self.update, self.micro_batch, mark))
        self.cost += time.perf_counter() - began

    def _leave_report(self, wire_bytes: int) -> None:
        def seconds(mark: Any) -> float:
            return self.clock.since(self.zero, mark) - self.offset

        rank, times = self.accelerator.process_index, [seconds(mark) for *_, mark in self.marks]
        spans = [
            Span(rank, update, micro_batch, phase, began, ended)
            for (phase, update, micro_batch, _), began, ended in zip(self.marks, times, times[1:], strict=False)
            if phase in PHASES
        ]
        sent = [
            Sent(rank=rank, **note | {"ready": seconds(note["ready"]), "ended": seconds(note["ended"])})
            for note in self.sent
        ]
        mine = {"spans": spans, "sent": sent, "bytes": wire_bytes, "cost": self.cost / len(self.steps)}
        everyone = gather_object([mine])
        if self.accelerator.is_main_process:
            gathered = {key: [one for part in everyone for one in part[key]] for key in ("spans", "sent")}
            zero = min(span.began for span in gathered["spans"])
            self.report = Report(
                self.accelerator.num_processes,
                [s._replace(began=s.began - zero, ended=s.ended - zero) for s in gathered["spans"]],
                [s._replace(ready=s.ready - zero, ended=s.ended - zero) for s in gathered["sent"]],
                self.buckets,
                sum(part["bytes"] for part in everyone),
                max(part["cost"] for part in everyone),
            )
            if self.folder is not None:
                write(self.report, self.folder)


def write(report: Report, folder: Path) -> None:
    """The table, for people and for programs, the trace and the page."""
    folder.mkdir(exist_ok=True)
    title = f"x-ray of {folder.parent}: updates {report.updates[0]} to {report.updates[-1]}"
    (folder / "table.txt").write_text("\n".join(as_lines(report)) + "\n")
    (folder / "summary.json").write_text(json_text(as_facts(report), indent=1))
    (folder / "trace.json").write_text(json.dumps(as_trace(report)))
    (folder / "timeline.html").write_text(as_html(report, title))
    say("x-ray", f"{folder}/timeline.html; trace.json beside it is for ui.perfetto.dev or chrome://tracing")


def _offset_of_this_clock(accelerator: Accelerator) -> float:
    """Seconds by which this process's clock is ahead of the first one's: none on one machine; else as read when all
    have met, the median of some meetings."""
    hosts = gather_object([platform.node()])
    if len(set(hosts)) == 1:
        return 0.0
    times = []
    for _ in range(_ROUNDS):
        float(accelerator.reduce(torch.ones((), device=accelerator.device)))
        times.append(time.perf_counter())
    everyone = gather_object([times])
    ahead = [mine - first for mine, first in zip(times, everyone[0], strict=True)]
    return statistics.median(ahead) if platform.node() != hosts[0] else 0.0


def _bytes_sent(accelerator: Accelerator) -> int:
    """By all network devices of this machine, loopback too, counted by one process of it."""
    counters = psutil.net_io_counters() if accelerator.is_local_main_process else None
    return counters.bytes_sent if counters is not None else 0
