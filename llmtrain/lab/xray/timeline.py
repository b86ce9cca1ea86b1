"""An x-ray as a table, as a trace for Perfetto or chrome://tracing, and as one HTML page."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmtrain.files import json_text, write_json
from llmtrain.json_types import JsonObject
from llmtrain.lab.xray.recording import Recording
from llmtrain.phase_names import PHASES

# Threads of a process in the trace.
_THREAD_NAMES = ("computes", "sends")
_COMPUTE_THREAD = 0
_SEND_THREAD = 1


def write_pages(recording: Recording, run: Path) -> None:
    """Write the table as text and as JSON, the trace, and the page into a run folder."""
    folder = run / "xray"
    title = f"x-ray of {run}: steps {recording.steps[0]} to {recording.steps[-1]}"
    numbers = summary(recording)
    trace = as_trace(recording)
    lines = as_lines(numbers)

    (folder / "table.txt").write_text("\n".join(lines) + "\n")
    write_json(folder / "summary.json", numbers, durable=False)
    (folder / "trace.json").write_text(json_text(trace))
    (folder / "timeline.html").write_text(as_html(recording, trace, lines, title))


def summary(recording: Recording) -> JsonObject:
    """Return the numbers of the table: mean seconds and bytes of a step.

    In a ring all-reduce every process sends 2 (N - 1) / N of the bytes that are reduced. No
    algorithm sends less (Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002).
    """
    numbers: JsonObject = {
        "steps": recording.steps,
        "processes": recording.processes,
        "seconds": recording.seconds(),
        "buckets": [],
    }
    if recording.transfers:
        numbers |= _transfer_summary(recording)
    numbers["recording_seconds"] = recording.cost
    return numbers


def _transfer_summary(recording: Recording) -> JsonObject:
    """Return the numbers of :func:`summary` that exist if DDP has sent buckets."""
    processes = recording.processes
    steps = len(recording.steps)
    communication = recording.communication()
    last_rank = recording.last_rank()
    all_bytes = sum(transfer.sent_bytes for transfer in recording.transfers)
    sent_bytes = all_bytes / (processes * steps)
    buckets = [
        {"bucket": number, **bucket._asdict(), **recording.bucket_times(number)}
        for number, bucket in sorted(recording.buckets.items())
    ]
    return {
        "buckets": buckets,
        "collectives": recording.collectives(),
        "hidden_seconds": communication.hidden,
        "exposed_seconds": communication.exposed,
        "waited_seconds": communication.waited,
        "hidden_share": communication.hidden_share,
        "last_rank": last_rank.rank,
        "last_rank_after_seconds": last_rank.seconds,
        "sent_bytes": sent_bytes,
        "ring_bytes": 2 * (processes - 1) / processes * sent_bytes,
        "counted_bytes": recording.counted_bytes / steps,
    }


def as_lines(numbers: JsonObject) -> list[str]:
    """Return the lines of the table, given the numbers of :func:`summary`."""
    step_seconds = statistics.mean(sum(phases.values()) for phases in numbers["seconds"])
    recording_share = numbers["recording_seconds"] / step_seconds
    text = _render("table.txt", **numbers, recording_share=recording_share)
    return text.splitlines()


def as_trace(recording: Recording) -> JsonObject:
    """Return a recording in Chrome's trace event format.

    Each rank is a process with two threads: one computes, the other sends. The format is described
    at https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[JsonObject] = []
    for rank in range(recording.processes):
        events += _names_of_rank(rank)

    for span in recording.spans:
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

    for transfer in recording.transfers:
        details: JsonObject = {
            "step": transfer.step,
            "sent_bytes": transfer.sent_bytes,
            "blocked_s": transfer.blocked,
            **recording.buckets[transfer.bucket]._asdict(),
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


def as_html(recording: Recording, trace: JsonObject, lines: list[str], title: str) -> str:
    """Return a page that needs no other file, with the table and a picture of each step.

    Args:
        recording: the recorded steps.
        trace: their trace, from :func:`as_trace`.
        lines: the table, from :func:`as_lines`.
        title: the title of the page.
    """
    pictures = []
    for step in recording.steps:
        events = [event for event in trace["traceEvents"] if event["args"].get("step") == step]
        pictures.append(_picture(step, events))
    return _render(
        "timeline.html",
        title=title,
        lines=lines,
        processes=recording.processes,
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
