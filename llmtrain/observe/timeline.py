"""What an x-ray shows: as a table, as a trace for Perfetto or chrome://tracing, and as one HTML page."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.observe.phases import PHASES

_PAGE = Path(__file__).with_name("timeline.html")
_COLOURS = {
    "data": "#b8860b",
    "count": "#d9d9d9",
    "forward": "#4c78a8",
    "backward": "#72a0c9",
    "exchange": "#e45756",
    "optimizer": "#54a24b",
    "other": "#9d9d9d",
}


class Span(NamedTuple):
    """A phase of one process; seconds since the x-ray began, by the first process's clock."""

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
    size: int  # bytes
    parameters: list[str]


@dataclass
class Report:
    processes: int
    spans: list[Span]
    sent: list[Sent]
    buckets: dict[int, Bucket]
    counted_bytes: int  # that the machines' network devices sent meanwhile; of whatever
    cost: float  # seconds an update that recording took, on the slowest process
    updates: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.updates = sorted({span.update for span in self.spans})
        full: dict[tuple[int, int, int], float] = {}
        for one in self.sent:
            key = one[1:4]
            full[key] = max(full.get(key, one.ready), one.ready)
        self.sent = [one._replace(began=min(full[one[1:4]], one.ended)) for one in self.sent]

    @property
    def length(self) -> float:
        """Mean seconds of an update, from data to data."""
        whole = [(min(s.began for s in spans), max(s.ended for s in spans)) for _, spans in self.timelines()]
        return statistics.mean(ended - began for began, ended in whole)

    def timelines(self) -> Iterator[tuple[tuple[int, int], list[Span]]]:
        """(update, rank) and its spans, in this order."""
        ordered = sorted(self.spans, key=lambda span: (span.update, span.rank, span.began))
        for key, group in groupby(ordered, key=lambda span: (span.update, span.rank)):
            yield key, list(group)

    def sent_by(self, update: int, rank: int) -> list[Sent]:
        return [one for one in self.sent if (one.update, one.rank) == (update, rank)]

    def seconds(self) -> list[dict[str, float]]:
        """Mean seconds of an update in each phase, by rank."""
        sums = [dict.fromkeys(PHASES, 0.0) for _ in range(self.processes)]
        for span in self.spans:
            sums[span.rank][span.phase] += (span.ended - span.began) / len(self.updates)
        return sums

    def communication(self, one_update: int | None = None) -> "Communication":
        """Mean seconds of a process in that update, or in all."""
        updates = self.updates if one_update is None else [one_update]
        hidden = exposed = waited = 0.0
        for (update, rank), spans in self.timelines():
            if update not in updates:
                continue
            travelling = _merged((one.began, one.ended) for one in self.sent_by(update, rank))
            blocked = sum(one.blocked for one in self.sent_by(update, rank))
            waiting = [(span.began, span.ended) for span in spans if span.phase == "exchange"]
            overlap = sum(_overlap(one, two) for one in travelling for two in waiting)
            exposed += overlap + blocked
            hidden += max(0.0, sum(end - begin for begin, end in travelling) - overlap - blocked)
            waited += max(0.0, sum(end - begin for begin, end in waiting) - overlap)
        share = 1 / (self.processes * len(updates))
        return Communication(hidden * share, exposed * share, waited * share)

    @property
    def sent_bytes(self) -> float:
        """Bytes an update that every process has to add up with the others."""
        return sum(one.sent_bytes for one in self.sent) / (self.processes * len(self.updates))

    @property
    def ring_bytes(self) -> float:
        """Bytes an update that every process sends in a ring all-reduce: 2 (N - 1) / N of what is added up (Patarasuk
        and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002); no algorithm sends less."""
        return 2 * (self.processes - 1) / self.processes * self.sent_bytes

    def rounds(self) -> list[list[int]]:
        """Of each update, the collectives for gradients that rank 0 began in each micro-batch."""
        counts = []
        for update in self.updates:
            batches = {span.micro_batch for span in self.spans if span.update == update and span.micro_batch >= 0}
            sent = [one.micro_batch for one in self.sent_by(update, 0)]
            counts.append([sent.count(batch) for batch in sorted(batches)])
        return counts

    def last_to_come(self) -> tuple[int, float]:
        """Who fills the first bucket last, and how long after the first who does, in the mean."""
        lags: list[list[float]] = [[] for _ in range(self.processes)]
        for update in self.updates:
            ready = [min((one.ready for one in self.sent_by(update, r)), default=0.0) for r in range(self.processes)]
            for rank, when in enumerate(ready):
                lags[rank].append(when - min(ready))
        means = [statistics.mean(lag) for lag in lags]
        return max(enumerate(means), key=lambda item: item[1])


class Communication(NamedTuple):
    hidden: float  # seconds in which buckets travelled while the backward pass went on
    exposed: float  # and in which it did not
    waited: float  # for other processes to fill their buckets

    @property
    def hidden_share(self) -> float:
        return self.hidden / max(self.hidden + self.exposed, 1e-12)


def as_lines(report: Report) -> list[str]:
    """The table."""
    first, last = report.updates[0], report.updates[-1]
    lines = [
        f"updates {first} to {last}, {report.processes} process{'es' * (report.processes > 1)}; milliseconds of an "
        "update, in the mean",
        "",
        f"{'rank':<6}" + "".join(f"{phase:>11}" for phase in PHASES) + f"{'update':>11}",
    ]
    for rank, seconds in enumerate(report.seconds()):
        values = [*seconds.values(), sum(seconds.values())]
        lines.append(f"{rank:<6}" + "".join(f"{1000 * value:>11.2f}" for value in values))
    if not report.sent:
        return [*lines, "", "no buckets: gradients are not exchanged by DDP here", _cost(report)]
    lines += ["", f"{'bucket':<8}{'MiB':>8}{'ready':>10}{'starts':>10}{'ends':>10}  parameters"]
    lines += [_bucket_line(report, number) for number in sorted(report.buckets)]
    moved = report.communication()
    lines += [
        "",
        f"travelling    {1000 * (moved.hidden + moved.exposed):.2f} ms an update: {1000 * moved.hidden:.2f} "
        f"({moved.hidden_share:.0%}) hidden behind the backward pass, {1000 * moved.exposed:.2f} exposed",
    ]
    if report.processes > 1:
        rank, lag = report.last_to_come()
        lines.append(
            f"waiting       {1000 * moved.waited:.2f} ms an update; rank {rank} fills the first bucket last, "
            f"{1000 * lag:.2f} ms after the first"
        )
    return [*lines, _collectives(report), *_bytes(report), _cost(report)]


def as_facts(report: Report) -> dict[str, Any]:
    """The table's numbers: seconds and bytes of an update, in the mean."""
    facts = {"updates": report.updates, "processes": report.processes, "seconds": report.seconds()}
    if not report.sent:
        return {**facts, "buckets": [], "recording_seconds": report.cost}
    buckets = [
        {"bucket": number, **bucket._asdict(), **_bucket_times(report, number)}
        for number, bucket in sorted(report.buckets.items())
    ]
    moved, (last, lag) = report.communication(), report.last_to_come()
    return {
        **facts,
        "buckets": buckets,
        "collectives": report.rounds(),
        **{f"{name}_seconds": seconds for name, seconds in moved._asdict().items()},
        "hidden_share": moved.hidden_share,
        "last_rank": last,
        "last_rank_after_seconds": lag,
        "sent_bytes": report.sent_bytes,
        "ring_bytes": report.ring_bytes,
        "counted_bytes": report.counted_bytes / len(report.updates),
        "recording_seconds": report.cost,
    }


def _bucket_times(report: Report, number: int) -> dict[str, float]:
    """Seconds of rank 0, since its update began, in the mean."""
    began = {update: min(s.began for s in spans) for (update, rank), spans in report.timelines() if rank == 0}
    mine = [one for one in report.sent if one.rank == 0 and one.bucket == number]
    return {name: statistics.mean(getattr(one, name) - began[one.update] for one in mine) for name in _BUCKET_TIMES}


_BUCKET_TIMES = ("ready", "began", "ended")


def _bucket_line(report: Report, number: int) -> str:
    ready, starts, ends = (1000 * seconds for seconds in _bucket_times(report, number).values())
    size, names = report.buckets[number]
    some = f"{names[0]} to {names[-1]} ({len(names)})" if len(names) > 1 else names[0]
    return f"{number:<8}{size / 2**20:>8.2f}{ready:>10.2f}{starts:>10.2f}{ends:>10.2f}  {some}"


def _collectives(report: Report) -> str:
    [counts, *others] = report.rounds()
    if any(other != counts for other in others):
        return f"collectives   differ between updates: {[counts, *others]}"
    *before, last = counts
    unsynced = f", none in the {len(before)} micro-batches before" if before and not any(before) else ""
    unsynced = unsynced or (f", and {sum(before)} in the {len(before)} micro-batches before" if before else "")
    buckets = f"{len(report.buckets)} bucket{'s' * (len(report.buckets) != 1)}"
    return f"collectives   {last} an update, in its last micro-batch, for {buckets}{unsynced}"


def _bytes(report: Report) -> list[str]:
    if report.processes == 1:
        return []
    all_sent = report.ring_bytes * report.processes
    counted = report.counted_bytes / len(report.updates)
    share = f"{counted / all_sent:.2f} of that" if counted > 0.1 * all_sent else "for most went another way"
    return [
        f"bytes         {report.sent_bytes / 2**20:.2f} MiB an update to add up; a ring sends 2(N-1)/N of it from each "
        f"process, {all_sent / 2**20:.2f} MiB from all; the network devices sent {counted / 2**20:.2f}, {share}"
    ]


def _cost(report: Report) -> str:
    return f"recording     took {1000 * report.cost:.2f} ms an update ({report.cost / report.length:.1%} of it)"


def as_trace(report: Report) -> dict[str, Any]:
    """Chrome's trace event format: a process a rank, with a thread for what it does and one for what it sends.
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    events: list[dict[str, Any]] = []
    for rank in range(report.processes):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("computes", "sends")):
            events.append(
                {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}},
            )
    for span in report.spans:
        where = {"update": span.update, "micro_batch": span.micro_batch}
        events.append(_event(span.rank, 0, span.phase, span.began, span.ended, where))
    for one in report.sent:
        bucket = report.buckets[one.bucket]
        details = {"update": one.update, "sent_bytes": one.sent_bytes, **bucket._asdict(), "blocked_s": one.blocked}
        events.append(_event(one.rank, 1, f"bucket {one.bucket} waits", one.ready, one.began, details))
        events.append(_event(one.rank, 1, f"bucket {one.bucket}", one.began, one.ended, details))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(rank: int, thread: int, name: str, began: float, ended: float, details: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(began * 1e6, 3), "dur": round(max(ended - began, 0.0) * 1e6, 3)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, "args": details}


def as_html(report: Report, title: str) -> str:
    """One page that needs nothing else: the table, and a picture of each update."""
    import jinja2

    pictures = []
    for update in report.updates:
        spans = [span for span in report.spans if span.update == update]
        began, ended = min(span.began for span in spans), max(span.ended for span in spans)
        pictures.append(_Picture(report, update, began, ended - began))
    page = jinja2.Template(_PAGE.read_text(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    lines = "\n".join(as_lines(report))
    return page.render(title=title, lines=lines, pictures=pictures, colours=_COLOURS, phases=PHASES)


class _Picture:
    """One update, as boxes in a drawing of fixed width."""

    left, width, lane, gap = 70, 1130, 20, 12

    def __init__(self, report: Report, update: int, began: float, length: float) -> None:
        self.report, self.update, self.began, self.length = report, update, began, max(length, 1e-9)
        self.height = 24 + report.processes * (2 * self.lane + self.gap)

    def x(self, seconds: float) -> float:
        return round(self.left + self.width * (seconds - self.began) / self.length, 2)

    def top(self, rank: int) -> int:
        return 24 + rank * (2 * self.lane + self.gap)

    def boxes(self, rank: int) -> Iterator[dict[str, Any]]:
        for span in self.report.spans:
            if (span.update, span.rank) == (self.update, rank):
                yield self._box(span.began, span.ended, PHASES[span.phase], _COLOURS[span.phase], span.phase)

    def travels(self, rank: int) -> Iterator[dict[str, Any]]:
        for one in self.report.sent_by(self.update, rank):
            bucket = self.report.buckets[one.bucket]
            what = f"bucket {one.bucket}, {bucket.size / 2**20:.2f} MiB: {', '.join(bucket.parameters)}"
            yield self._box(one.ready, one.began, f"waits for the other processes: {what}", "#f3c6c6", "")
            yield self._box(one.began, one.ended, what, "#b279a2", f"{one.bucket}")

    def _box(self, began: float, ended: float, title: str, colour: str, label: str) -> dict[str, Any]:
        width = max(self.x(ended) - self.x(began), 0.4)
        fits = label if width > 7 * len(label) + 4 else ""
        text = f"{title}: {1000 * (ended - began):.3f} ms"
        return {"x": self.x(began), "width": round(width, 2), "title": text, "colour": colour, "label": fits}

    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers of milliseconds, about ten of them."""
        total = 1000 * self.length
        scale = 10.0 ** math.floor(math.log10(total / 10))
        step = next(n * scale for n in (1, 2, 5, 10) if total / (n * scale) <= 12)
        return [(self.x(self.began + i * step / 1000), f"{i * step:g}") for i in range(int(total / step) + 1)]


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
