"""An x-ray as numbers, as a table of text, and as one HTML page."""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from llmtrain.files import JsonObject
from llmtrain.lab.xray.recording import Recording, Span, Transfer
from llmtrain.phase_names import PHASES


def summary(recording: Recording) -> JsonObject:
    """Return the numbers of the table: mean seconds and bytes of a step.

    In a ring all-reduce every process sends 2 (N - 1) / N of the bytes that are reduced. No
    algorithm sends less (Patarasuk and Yuan, 2009, DOI 10.1016/j.jpdc.2008.09.002).
    """
    processes = recording.processes
    numbers: JsonObject = {
        "steps": recording.steps,
        "processes": processes,
        "seconds": recording.seconds(),
        "buckets": [],
        "recording_seconds": recording.cost,
    }
    if not recording.transfers:
        return numbers

    communication = recording.communication()
    last_rank, last_rank_after = recording.last_rank()
    sent_by_all = sum(transfer.sent_bytes for transfer in recording.transfers)
    sent_bytes = sent_by_all / (processes * len(recording.steps))
    buckets = [
        {"bucket": number, **bucket._asdict(), **recording.bucket_times(number)}
        for number, bucket in sorted(recording.buckets.items())
    ]
    return numbers | {
        "buckets": buckets,
        "hidden_seconds": communication.hidden,
        "exposed_seconds": communication.exposed,
        "waited_seconds": communication.waited,
        "hidden_share": communication.hidden_share,
        "last_rank": last_rank,
        "last_rank_after_seconds": last_rank_after,
        "sent_bytes": sent_bytes,
        "ring_bytes": 2 * (processes - 1) / processes * sent_bytes,
    }


def as_lines(numbers: JsonObject) -> list[str]:
    """Return the lines of the table, given the numbers of :func:`summary`."""
    step_seconds = statistics.mean(sum(phases.values()) for phases in numbers["seconds"])
    recording_share = numbers["recording_seconds"] / step_seconds
    text = _render("table.txt", **numbers, recording_share=recording_share)
    return text.splitlines()


class Picture(NamedTuple):
    """One step as boxes on a horizontal axis; times are in seconds."""

    step: int
    spans: list[Span]
    transfers: list[Transfer]
    start: float  # when the step began
    length: float
    tick: float  # between two marks on the axis


def _picture(recording: Recording, step: int) -> Picture:
    spans = [span for span in recording.spans if span.step == step]
    transfers = [transfer for transfer in recording.transfers if transfer.step == step]
    start = min(span.start for span in spans)
    ends = [span.end for span in spans] + [transfer.end for transfer in transfers]
    length = max(max(ends) - start, 1e-9)

    # Round ticks, about ten of them.
    scale = 10.0 ** math.floor(math.log10(length / 10))
    tick = next(n * scale for n in (1, 2, 5, 10) if length / (n * scale) <= 12)
    return Picture(step, spans, transfers, start=start, length=length, tick=tick)


def as_html(recording: Recording, lines: list[str], title: str) -> str:
    """Return a page that needs no other file, with the table and a picture of each step.

    Args:
        recording: the recorded steps.
        lines: the table, from :func:`as_lines`.
        title: the title of the page.
    """
    return _render(
        "timeline.html",
        title=title,
        lines=lines,
        processes=recording.processes,
        phases=PHASES,
        buckets=recording.buckets,
        pictures=[_picture(recording, step) for step in recording.steps],
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
