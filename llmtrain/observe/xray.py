"""An x-ray of some updates: what each process does when, and which bucket of gradients travels meanwhile."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from accelerate.utils import gather_object
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's stub lacks it

from llmtrain.console import say
from llmtrain.files import json_text
from llmtrain.observe.phases import PHASES, Mark, Phases
from llmtrain.observe.timeline import (
    Bucket,
    Report,
    Sent,
    Span,
    as_facts,
    as_html,
    as_lines,
    as_trace,
)
from llmtrain.parallel.collectives import BucketMean
from llmtrain.parallel.ranks import Ranks

_ROUNDS = 9  # in which the machines' clocks are compared


class XRay:
    """Records the updates in ``steps`` (the first is 1).

    After the last of them ``report`` is there on the main process, and, where there is a ``folder``, as files in it.
    :meth:`on_bucket` is to be called for every bucket of gradients that is full.
    """

    def __init__(
        self,
        ranks: Ranks,
        phases: Phases,
        model: nn.Module,
        steps: range,
        folder: Path | None = None,
    ) -> None:
        self.ranks = ranks
        self.phases = phases
        self.steps = steps
        self.folder = folder
        self.clock = phases.clock
        self.zero = phases.clock.now()
        self.names: dict[torch.Tensor, str] = {
            p: name.removeprefix("module.") for name, p in model.named_parameters()
        }
        self.recording = False
        self.cost = 0.0  # seconds that recording itself took
        self.offset = 0.0  # seconds by which this process's clock is ahead of the first one's
        self.bytes_before = 0  # that this machine had sent when recording began
        self.marks: list[
            tuple[str, int, int, Mark]
        ] = []  # phase, update, micro-batch, when it began
        self.sent: list[
            tuple[Sent, Mark, Mark]
        ] = []  # its times are those of the marks: ready, ended
        self.buckets: dict[int, Bucket] = {}
        self.update = self.micro_batch = -1
        self.report: Report | None = None
        phases.on_change.append(self._at)

    def at_step_boundary(self, step: int) -> None:
        """Begin or end after ``step`` updates. All ranks call this after every update, and before the first."""
        if step + 1 == self.steps.start:
            self.offset = _offset_of_this_clock(self.ranks)
            self.bytes_before = _bytes_sent(self.ranks)
            self.zero = self.clock.zero()
            self.recording = True
        elif self.recording and step == self.steps[-1]:
            self.phases.at("other")  # which ends what was before
            self.recording = False
            self._make_report()

    def on_bucket(
        self, bucket: GradBucket, send: Callable[[GradBucket], BucketMean], sent_bytes: int
    ) -> BucketMean:
        """Send a bucket that is full, and note how that goes."""
        if not self.recording or self.phases.phase == "getting ready":
            return send(bucket)
        began = time.perf_counter()
        number, place = (
            bucket.index(),
            (self.ranks.rank, self.update, self.micro_batch),
        )
        names = [self.names.get(parameter, "?") for parameter in bucket.parameters()]
        self.buckets[number] = Bucket(
            bucket.buffer().nbytes, names
        )  # DDP makes others after the first update
        ready, sending = self.clock.now(), time.perf_counter()
        future = send(bucket)
        taken = time.perf_counter() - sending

        def arrived(done: BucketMean) -> torch.Tensor:
            blocked = 0.0 if self.clock.queues else taken
            self.sent.append(
                (Sent(*place, number, sent_bytes, 0.0, blocked, 0.0), ready, self.clock.now())
            )
            return done.value()

        future = future.then(arrived)
        self.cost += time.perf_counter() - began - taken
        return future

    def _at(self, phase: str, mark: Mark) -> None:
        if not self.recording:
            return
        began = time.perf_counter()
        if phase == "data":
            self.update, self.micro_batch = self.phases.step + 1, -1
        self.micro_batch += phase == "forward"
        self.marks.append((phase, self.update, self.micro_batch, mark))
        self.cost += time.perf_counter() - began

    def _make_report(self) -> None:
        counted: list[int] = gather_object([_bytes_sent(self.ranks) - self.bytes_before])
        costs: list[float] = gather_object([self.cost / len(self.steps)])

        def seconds(mark: Mark) -> float:
            return self.clock.since(self.zero, mark) - self.offset

        rank, times = self.ranks.rank, [seconds(mark) for *_, mark in self.marks]
        mine = [
            Span(rank, update, micro_batch, phase, began, ended)
            for (phase, update, micro_batch, _), began, ended in zip(
                self.marks, times, times[1:], strict=False
            )
            if phase in PHASES
        ]
        spans: list[Span] = gather_object(mine)
        timed = [
            one._replace(ready=seconds(ready), ended=seconds(ended))
            for one, ready, ended in self.sent
        ]
        sent: list[Sent] = gather_object(timed)
        if self.ranks.is_main:
            self.report = Report(len(costs), spans, sent, self.buckets, sum(counted), max(costs))
            if self.folder is not None:
                write(self.report, self.folder)


def write(report: Report, folder: Path) -> None:
    """Write the table, for people and for programs, the trace and the page."""
    folder.mkdir(exist_ok=True)
    title = f"x-ray of {folder.parent}: updates {report.updates[0]} to {report.updates[-1]}"
    (folder / "table.txt").write_text("\n".join(as_lines(report)) + "\n")
    (folder / "summary.json").write_text(json_text(as_facts(report), indent=1))
    (folder / "trace.json").write_text(json.dumps(as_trace(report)))
    (folder / "timeline.html").write_text(as_html(report, title))
    say(
        "x-ray",
        f"{folder}/timeline.html; trace.json beside it is for ui.perfetto.dev or chrome://tracing",
    )


def _offset_of_this_clock(ranks: Ranks) -> float:
    """Return the seconds by which this process's clock is ahead of the first one's.

    None on one machine; else as read when all have met, the median of some meetings.
    """
    hosts: list[str] = gather_object([platform.node()])
    if len(set(hosts)) == 1:
        return 0.0
    times = []
    for _ in range(_ROUNDS):
        float(ranks.accelerator.reduce(torch.ones((), device=ranks.device)))
        times.append(time.perf_counter())
    first = gather_object(times)[:_ROUNDS]
    ahead = statistics.median(mine - its for mine, its in zip(times, first, strict=True))
    return ahead if platform.node() != hosts[0] else 0.0


def _bytes_sent(ranks: Ranks) -> int:
    """Return the bytes that all network devices of this machine sent, loopback too, counted by one process of it."""
    counters = psutil.net_io_counters() if ranks.is_local_main else None
    return counters.bytes_sent if counters is not None else 0
