"""An x-ray as a table, as a trace for Perfetto or chrome://tracing, and as one HTML page."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from llmtrain.observe.phases import PHASES
from llmtrain.types import Facts


class Span(NamedTuple):
    """A phase of one process; seconds of the first one's ``time.perf_counter``."""

    rank: int
    update: int  # the first is 1
    micro_batch: int  # in its window; -1 before the first
    phase: str
    began: float
    ended: float


class Sent(NamedTuple):
    """A bucket that one process sent; seconds like those of a span."""

    rank: int
    update: int
    micro_batch: int
    bucket: int
    sent_bytes: int  # that are added up over the processes; fewer than the bucket has where it is sent approximately
    ready: float  # full on this process
    blocked: float  # seconds of the backward pass that sending it took
    ended: float
    began: float = 0.0  # full on every process


class Bucket(NamedTuple):
    """Gradients that DDP sends together."""

    size: int  # bytes
    parameters: list[str]


class Communication(NamedTuple):
    """Mean seconds of an update on one process."""

    hidden: float  # in which buckets travelled while the backward pass went on
    exposed: float  # and in which it did not
    waited: float  # for other processes to fill their buckets

    @property
    def hidden_share(self) -> float:
        return self.hidden / max(self.hidden + self.exposed, 1e-12)


@dataclass
class Report:
    """The x-ray of some updates, of all processes."""

    processes: int
    spans: list[Span]
    sent: list[Sent]
    buckets: dict[int, Bucket]
    counted_bytes: int  # that the machines' network devices sent meanwhile; of whatever
    cost: float  # seconds an update that recording took, on the slowest process
    updates: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.updates = sorted({span.update for span in self.spans})
        full: dict[tuple[int, ...], float] = {}  # by update, micro-batch and bucket
        for one in self.sent:
            full[one[1:4]] = max(full.get(one[1:4], one.ready), one.ready)
        self.sent = [one._replace(began=min(full[one[1:4]], one.ended)) for one in self.sent]

    def timelines(self) -> Iterator[tuple[tuple[int, int], list[Span]]]:
        """Yield (update, rank) and its spans, in this order."""
        ordered = sorted(self.spans, key=lambda span: (span.update, span.rank, span.began))
        for key, group in groupby(ordered, key=lambda span: (span.update, span.rank)):
            yield key, list(group)

    def sent_by(self, update: int, rank: int) -> list[Sent]:
        """Return the buckets that a process sent in an update."""
        return [one for one in self.sent if (one.update, one.rank) == (update, rank)]

    def seconds(self) -> list[dict[str, float]]:
        """Return the mean seconds of an update in each phase, by rank."""
        sums = [dict.fromkeys(PHASES, 0.0) for _ in range(self.processes)]
        for span in self.spans:
            sums[span.rank][span.phase] += (span.ended - span.began) / len(self.updates)
        return sums

    def communication(self, one_update: int | None = None) -> Communication:
        """Return the mean seconds of a process in that update, or in all."""
        found = []
        for (update, rank), spans in self.timelines():
            if one_update not in (None, update):
                continue
            sent = self.sent_by(update, rank)
            travelling = _union((one.began, one.ended) for one in sent)
            waiting = [(span.began, span.ended) for span in spans if span.phase == "exchange"]
            both = sum(
                max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in travelling for b in waiting
            )
            exposed = both + sum(one.blocked for one in sent)
            hidden, waited = _total(travelling) - exposed, _total(waiting) - both
            found.append((max(0.0, hidden), exposed, max(0.0, waited)))
        return Communication(*map(statistics.mean, zip(*found, strict=True)))

    def rounds(self) -> list[list[int]]:
        """Return, of each update, the collectives for gradients that rank 0 began in each micro-batch."""
        counts = []
        for update in self.updates:
            batches = {
                span.micro_batch
                for span in self.spans
                if span.update == update and span.micro_batch >= 0
            }
            sent = [one.micro_batch for one in self.sent_by(update, 0)]
            counts.append([sent.count(batch) for batch in sorted(batches)])
        return counts

    def last_to_come(self) -> tuple[int, float]:
        """Return who fills the first bucket last, and the mean seconds after the first who does."""
        lags: list[list[float]] = []
        for update in self.updates:
            ready = [
                min((one.ready for one in self.sent_by(update, r)), default=0.0)
                for r in range(self.processes)
            ]
            lags.append([when - min(ready) for when in ready])
        means = [statistics.mean(lag) for lag in zip(*lags, strict=True)]
        return max(enumerate(means), key=lambda item: item[1])

    def bucket_times(self, number: int) -> dict[str, float]:
        """Return when a bucket was ready, began and ended: mean seconds of rank 0 since its update began."""
        began = {update: spans[0].began for (update, rank), spans in self.timelines() if rank == 0}
        mine = [one for one in self.sent if one.rank == 0 and one.bucket == number]
        times = [
            [when - began[one.update] for when in (one.ready, one.began, one.ended)] for one in mine
        ]
        return dict(
            zip(
                ("ready", "began", "ended"),
                map(statistics.mean, zip(*times, strict=True)),
                strict=True,
            )
        )


def as_facts(report: Report) -> Facts:
    """Return the table's numbers: seconds and bytes of an update, in the mean.

    In a ring all-reduce every process sends 2 (N - 1) / N of what is added up, and no algorithm sends less (Patarasuk
    and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002).
    """
    processes, updates = report.processes, len(report.updates)
    facts: Facts = {
        "updates": report.updates,
        "processes": processes,
        "seconds": report.seconds(),
        "buckets": [],
    }
    if report.sent:
        moved, (last, lag) = report.communication(), report.last_to_come()
        sent_bytes = sum(one.sent_bytes for one in report.sent) / (processes * updates)
        facts["buckets"] = [
            {"bucket": number, **bucket._asdict(), **report.bucket_times(number)}
            for number, bucket in sorted(report.buckets.items())
        ]
        facts |= {
            "collectives": report.rounds(),
            **{f"{name}_seconds": seconds for name, seconds in moved._asdict().items()},
            "hidden_share": moved.hidden_share,
            "last_rank": last,
            "last_rank_after_seconds": lag,
            "sent_bytes": sent_bytes,
            "ring_bytes": 2 * (processes - 1) / processes * sent_bytes,
            "counted_bytes": report.counted_bytes / updates,
        }
    return {**facts, "recording_seconds": report.cost}


def as_lines(report: Report) -> list[str]:
    """Return the table, for a person."""
    share = report.cost / statistics.mean(sum(phases.values()) for phases in report.seconds())
    return _render("table.txt", **as_facts(report), recording_share=share).splitlines()


def as_trace(report: Report) -> Facts:
    """Return Chrome's trace event format: a process a rank, with a thread for what it does and one for what it sends.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[Facts] = []
    for rank in range(report.processes):
        events.append(
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        )
        for thread, name in enumerate(("computes", "sends")):
            events.append(
                {
                    "ph": "M",
                    "pid": rank,
                    "tid": thread,
                    "name": "thread_name",
                    "args": {"name": name},
                }
            )

    def add(rank: int, thread: int, name: str, began: float, ended: float, details: Facts) -> None:
        times = {"ts": round(began * 1e6, 3), "dur": round(max(ended - began, 0.0) * 1e6, 3)}
        events.append(
            {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, "args": details}
        )

    for span in report.spans:
        add(
            span.rank,
            0,
            span.phase,
            span.began,
            span.ended,
            {"update": span.update, "micro_batch": span.micro_batch},
        )
    for one in report.sent:
        details = {"update": one.update, "sent_bytes": one.sent_bytes, "blocked_s": one.blocked}
        details |= report.buckets[one.bucket]._asdict()
        add(one.rank, 1, f"bucket {one.bucket} waits", one.ready, one.began, details)
        add(one.rank, 1, f"bucket {one.bucket}", one.began, one.ended, details)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class Picture(NamedTuple):
    """One step as boxes on a horizontal axis; times are in microseconds."""

    step: int
    events: list[Facts]  # of Chrome's trace event format
    zero: float  # when the step began
    length: float
    tick: float  # between two marks on the axis


def _picture(step: int, events: list[Facts]) -> Picture:
    zero = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] - zero for event in events)
    length = max(length, 1e-3)

    # Round ticks, about ten of them.
    scale = 10.0 ** math.floor(math.log10(length / 10))
    tick = next(n * scale for n in (1, 2, 5, 10) if length / (n * scale) <= 12)
    return Picture(step=step, events=events, zero=zero, length=length, tick=tick)


def as_html(report: Report, title: str) -> str:
    """Return one page that needs nothing else: the table, and a picture of each step."""
    trace = as_trace(report)["traceEvents"]
    pictures = []
    for step in report.updates:
        events = [event for event in trace if event["args"].get("update") == step]
        pictures.append(_picture(step, events))
    return _render(
        "timeline.html",
        title=title,
        lines=as_lines(report),
        processes=report.processes,
        phases=PHASES,
        pictures=pictures,
    )


def _render(name: str, **facts: object) -> str:
    import jinja2

    text, is_page = Path(__file__).with_name(name).read_text(), name.endswith(".html")
    template = jinja2.Template(text, autoescape=is_page, trim_blocks=True, lstrip_blocks=True)
    return str(template.render(facts))


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def _total(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in intervals)
