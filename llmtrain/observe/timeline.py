"""An x-ray as a table, as a trace for Perfetto or chrome://tracing, and as one HTML page."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeAlias

from llmtrain.phases import PHASES
from llmtrain.types import JsonObject

Interval: TypeAlias = tuple[float, float]  # start and end, in seconds

# Threads of a process in the trace.
_THREAD_NAMES = ("computes", "sends")
_COMPUTE_THREAD = 0
_SEND_THREAD = 1


class Span(NamedTuple):
    """A phase of one process. Times are seconds of ``time.perf_counter`` on rank 0."""

    rank: int
    step: int  # the first is 1
    micro_batch: int  # of the step; -1 before the first
    phase: str
    start: float
    end: float


class Transfer(NamedTuple):
    """A bucket of gradients that one process sent. Times are like those of a span."""

    rank: int
    step: int
    micro_batch: int
    bucket: int
    sent_bytes: int  # summed over the processes; fewer than the bucket has if it is compressed
    ready: float  # when the bucket was full on this process
    blocked: float  # seconds of the backward pass that sending took
    end: float
    start: float = 0.0  # when the bucket was full on every process; Report computes it

    @property
    def key(self) -> tuple[int, int, int]:
        """The step, micro-batch and bucket, which identify a transfer on each process."""
        return (self.step, self.micro_batch, self.bucket)


class Bucket(NamedTuple):
    """Gradients that DDP sends together."""

    size: int  # bytes
    parameters: list[str]


class Timeline(NamedTuple):
    """The spans of one process in one step, in their order."""

    step: int
    rank: int
    spans: list[Span]


class Communication(NamedTuple):
    """Mean seconds of a step on one process."""

    hidden: float  # in which buckets travelled while the backward pass continued
    exposed: float  # in which buckets travelled and the backward pass did not continue
    waited: float  # in which the process waited for others to fill their buckets

    @property
    def hidden_share(self) -> float:
        """The hidden share of the seconds in which buckets travelled."""
        return self.hidden / max(self.hidden + self.exposed, 1e-12)


class LastRank(NamedTuple):
    """The process that fills the first bucket last."""

    rank: int
    seconds: float  # mean seconds after the process that fills it first


@dataclass
class Report:
    """The x-ray of some steps, on all processes.

    Attributes:
        processes: the number of processes.
        spans: the phases of all processes.
        transfers: the buckets that the processes sent.
        buckets: the buckets of gradients by number.
        counted_bytes: all bytes that the machines' network devices sent during these steps.
        cost: seconds per step that recording took, on the slowest process.
        steps: their numbers.
    """

    processes: int
    spans: list[Span]
    transfers: list[Transfer]
    buckets: dict[int, Bucket]
    counted_bytes: int
    cost: float
    steps: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = sorted({span.step for span in self.spans})

        # A bucket begins to travel when the last process has filled it.
        last_ready: dict[tuple[int, int, int], float] = {}
        for transfer in self.transfers:
            latest = last_ready.get(transfer.key, transfer.ready)
            last_ready[transfer.key] = max(latest, transfer.ready)
        self.transfers = [
            transfer._replace(start=min(last_ready[transfer.key], transfer.end))
            for transfer in self.transfers
        ]

    def timelines(self) -> Iterator[Timeline]:
        """Yield the timeline of each process in each step, ordered by step and rank."""
        ordered = sorted(self.spans, key=lambda span: (span.step, span.rank, span.start))
        for (step, rank), spans in groupby(ordered, key=lambda span: (span.step, span.rank)):
            yield Timeline(step, rank, list(spans))

    def sent_by(self, step: int, rank: int) -> list[Transfer]:
        """Return the buckets that a process sent in a step."""
        return [
            transfer
            for transfer in self.transfers
            if transfer.step == step and transfer.rank == rank
        ]

    def seconds(self) -> list[dict[str, float]]:
        """Return the mean seconds of a step in each phase, by rank."""
        sums = [dict.fromkeys(PHASES, 0.0) for _ in range(self.processes)]
        for span in self.spans:
            sums[span.rank][span.phase] += (span.end - span.start) / len(self.steps)
        return sums

    def communication(self, step: int | None = None) -> Communication:
        """Return the mean seconds of a process in one step, or in all of them."""
        by_process = [
            self._communication_of(timeline)
            for timeline in self.timelines()
            if step is None or timeline.step == step
        ]
        return Communication(
            hidden=statistics.mean(seconds.hidden for seconds in by_process),
            exposed=statistics.mean(seconds.exposed for seconds in by_process),
            waited=statistics.mean(seconds.waited for seconds in by_process),
        )

    def _communication_of(self, timeline: Timeline) -> Communication:
        """Return the seconds of one process in one step."""
        transfers = self.sent_by(timeline.step, timeline.rank)
        travelling = _union((transfer.start, transfer.end) for transfer in transfers)
        waiting = [(span.start, span.end) for span in timeline.spans if span.phase == "exchange"]

        travelling_while_waiting = _overlap(travelling, waiting)
        exposed = travelling_while_waiting + sum(transfer.blocked for transfer in transfers)
        return Communication(
            hidden=max(0.0, _total(travelling) - exposed),
            exposed=exposed,
            waited=max(0.0, _total(waiting) - travelling_while_waiting),
        )

    def collectives(self) -> list[list[int]]:
        """Return how many buckets rank 0 sent in each micro-batch, for each step."""
        counts = []
        for step in self.steps:
            micro_batches = {
                span.micro_batch
                for span in self.spans
                if span.step == step and span.micro_batch >= 0
            }
            sent_in = [transfer.micro_batch for transfer in self.sent_by(step, rank=0)]
            counts.append([sent_in.count(micro_batch) for micro_batch in sorted(micro_batches)])
        return counts

    def last_rank(self) -> LastRank:
        """Return the process that fills the first bucket last, in the mean over the steps."""
        lags_by_rank: list[list[float]] = [[] for _ in range(self.processes)]
        for step in self.steps:
            ready = [self._first_ready(step, rank) for rank in range(self.processes)]
            first = min(ready)
            for lags, seconds in zip(lags_by_rank, ready, strict=True):
                lags.append(seconds - first)

        mean_lags = [statistics.mean(lags) for lags in lags_by_rank]
        rank = max(range(self.processes), key=mean_lags.__getitem__)
        return LastRank(rank, mean_lags[rank])

    def _first_ready(self, step: int, rank: int) -> float:
        """Return when a process filled its first bucket of a step; 0 if it sent none."""
        return min((transfer.ready for transfer in self.sent_by(step, rank)), default=0.0)

    def bucket_times(self, number: int) -> dict[str, float]:
        """Return when a bucket was ``ready``, ``began`` to travel and ``ended``, on rank 0.

        The times are mean seconds since the step began.
        """
        step_starts = {
            timeline.step: timeline.spans[0].start
            for timeline in self.timelines()
            if timeline.rank == 0
        }
        transfers = [
            transfer
            for transfer in self.transfers
            if transfer.rank == 0 and transfer.bucket == number
        ]
        return {
            "ready": statistics.mean(t.ready - step_starts[t.step] for t in transfers),
            "began": statistics.mean(t.start - step_starts[t.step] for t in transfers),
            "ended": statistics.mean(t.end - step_starts[t.step] for t in transfers),
        }


def summary(report: Report) -> JsonObject:
    """Return the numbers of the table: mean seconds and bytes of a step.

    In a ring all-reduce every process sends 2 (N - 1) / N of the bytes that are reduced. No
    algorithm sends less (Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002).
    """
    numbers: JsonObject = {
        "steps": report.steps,
        "processes": report.processes,
        "seconds": report.seconds(),
        "buckets": [],
    }
    if report.transfers:
        numbers |= _transfer_summary(report)
    numbers["recording_seconds"] = report.cost
    return numbers


def _transfer_summary(report: Report) -> JsonObject:
    """Return the numbers of :func:`summary` that exist if DDP has sent buckets."""
    processes = report.processes
    steps = len(report.steps)
    communication = report.communication()
    last_rank = report.last_rank()
    all_bytes = sum(transfer.sent_bytes for transfer in report.transfers)
    sent_bytes = all_bytes / (processes * steps)
    buckets = [
        {"bucket": number, **bucket._asdict(), **report.bucket_times(number)}
        for number, bucket in sorted(report.buckets.items())
    ]
    return {
        "buckets": buckets,
        "collectives": report.collectives(),
        "hidden_seconds": communication.hidden,
        "exposed_seconds": communication.exposed,
        "waited_seconds": communication.waited,
        "hidden_share": communication.hidden_share,
        "last_rank": last_rank.rank,
        "last_rank_after_seconds": last_rank.seconds,
        "sent_bytes": sent_bytes,
        "ring_bytes": 2 * (processes - 1) / processes * sent_bytes,
        "counted_bytes": report.counted_bytes / steps,
    }


def as_lines(report: Report) -> list[str]:
    """Return the lines of the table."""
    step_seconds = statistics.mean(sum(phases.values()) for phases in report.seconds())
    recording_share = report.cost / step_seconds
    text = _render("table.txt", **summary(report), recording_share=recording_share)
    return text.splitlines()


def as_trace(report: Report) -> JsonObject:
    """Return the report in Chrome's trace event format.

    Each rank is a process with two threads: one computes, the other sends. The format is described
    at https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[JsonObject] = []
    for rank in range(report.processes):
        events += _names_of_rank(rank)

    for span in report.spans:
        events.append(
            _box(
                rank=span.rank,
                thread=_COMPUTE_THREAD,
                name=span.phase,
                start=span.start,
                end=span.end,
                details={"step": span.step, "micro_batch": span.micro_batch},
            )
        )

    for transfer in report.transfers:
        details: JsonObject = {
            "step": transfer.step,
            "sent_bytes": transfer.sent_bytes,
            "blocked_s": transfer.blocked,
            **report.buckets[transfer.bucket]._asdict(),
        }
        events.append(
            _box(
                rank=transfer.rank,
                thread=_SEND_THREAD,
                name=f"bucket {transfer.bucket} waits",
                start=transfer.ready,
                end=transfer.start,
                details=details,
            )
        )
        events.append(
            _box(
                rank=transfer.rank,
                thread=_SEND_THREAD,
                name=f"bucket {transfer.bucket}",
                start=transfer.start,
                end=transfer.end,
                details=details,
            )
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names_of_rank(rank: int) -> Iterator[JsonObject]:
    """Yield the events that name a process and its threads."""
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    for thread, name in enumerate(_THREAD_NAMES):
        yield {
            "ph": "M",
            "pid": rank,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": name},
        }


def _box(
    *,
    rank: int,
    thread: int,
    name: str,
    start: float,
    end: float,
    details: JsonObject,
) -> JsonObject:
    """Return the event that draws a box from ``start`` to ``end``."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": round(start * 1e6, 3),
        "dur": round(max(end - start, 0.0) * 1e6, 3),
        "args": details,
    }


class Picture(NamedTuple):
    """One step as boxes on a horizontal axis; times are in microseconds."""

    step: int
    events: list[JsonObject]  # in Chrome's trace event format
    zero: float  # when the step began
    length: float
    tick: float  # between two marks on the axis


def _picture(step: int, events: list[JsonObject]) -> Picture:
    zero = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] - zero for event in events)
    length = max(length, 1e-3)

    # Round ticks, about ten of them.
    scale = 10.0 ** math.floor(math.log10(length / 10))
    tick = next(n * scale for n in (1, 2, 5, 10) if length / (n * scale) <= 12)
    return Picture(step=step, events=events, zero=zero, length=length, tick=tick)


def as_html(report: Report, title: str) -> str:
    """Return a page that needs no other file, with the table and a picture of each step."""
    trace = as_trace(report)["traceEvents"]
    pictures = []
    for step in report.steps:
        events = [event for event in trace if event["args"].get("step") == step]
        pictures.append(_picture(step, events))
    return _render(
        "timeline.html",
        title=title,
        lines=as_lines(report),
        processes=report.processes,
        phases=PHASES,
        pictures=pictures,
    )


def _render(name: str, **values: object) -> str:
    """Fill in a template of this folder."""
    import jinja2

    template = jinja2.Template(
        Path(__file__).with_name(name).read_text(),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return str(template.render(values))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times in any of the intervals, as intervals that do not overlap."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            last_start, last_end = union[-1]
            union[-1] = (last_start, max(last_end, end))
        else:
            union.append((start, end))
    return union


def _overlap(first: list[Interval], second: list[Interval]) -> float:
    """Return the seconds that are in both, if neither has intervals that overlap."""
    overlaps = []
    for first_start, first_end in first:
        for second_start, second_end in second:
            seconds = min(first_end, second_end) - max(first_start, second_start)
            overlaps.append(max(0.0, seconds))
    return sum(overlaps)


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
