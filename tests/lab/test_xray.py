"""An x-ray's arithmetic, on times made by hand; that its pictures hold what it says."""

import json
import re
from html.parser import HTMLParser

import pytest

from llmtrain.lab.xray.recording import Bucket, Recording, Span, Transfer
from llmtrain.lab.xray.timeline import as_html, as_lines, as_trace, summary
from llmtrain.phase_names import PHASES

MS = 1e-3


def recording(wait: float = 0.0, blocked: float = 0.0) -> Recording:
    """Return the recording of two processes and two steps of 100 ms.

    Backward is from 20 to 60 ms. Bucket 0 is full at 30, on rank 1 ``wait`` later, and travels until
    50. Bucket 1 travels from 60 to 75.
    """
    spans = []
    transfers = []
    for step in (6, 7):
        zero = (step - 6) * 100 * MS
        for rank in (0, 1):
            edges = {
                "data": (0, 5),
                "count": (5, 10),
                "forward": (10, 20),
                "backward": (20, 60),
                "exchange": (60, 75),
                "norm": (75, 78),
                "optimizer": (78, 95),
                "other": (95, 100),
            }
            assert [*edges] == [*PHASES]
            for phase, (start, end) in edges.items():
                spans.append(
                    Span(
                        rank=rank,
                        step=step,
                        micro_batch=-1 if phase in ("data", "count") else 0,
                        phase=phase,
                        start=zero + start * MS,
                        end=zero + end * MS,
                    )
                )
            transfers.append(
                Transfer(
                    rank=rank,
                    step=step,
                    micro_batch=0,
                    bucket=0,
                    sent_bytes=4 << 20,
                    ready=zero + (30 + wait * rank) * MS,
                    blocked=blocked * MS,
                    end=zero + 50 * MS,
                )
            )
            transfers.append(
                Transfer(
                    rank=rank,
                    step=step,
                    micro_batch=0,
                    bucket=1,
                    sent_bytes=1 << 20,
                    ready=zero + 60 * MS,
                    blocked=0.0,
                    end=zero + 75 * MS,
                )
            )
    buckets = {0: Bucket(4 << 20, ["h.1.w", "h.1.b"]), 1: Bucket(1 << 20, ["h.0.w"])}
    return Recording(
        processes=2,
        spans=spans,
        transfers=transfers,
        buckets=buckets,
        counted_bytes=21 << 20,
        cost=0.5 * MS,
    )


def page_of(recorded: Recording, title: str) -> str:
    return as_html(recorded, as_trace(recorded), as_lines(summary(recorded)), title)


def test_what_travels_while_the_backward_pass_computes_is_hidden_and_the_rest_exposed() -> None:
    moved = recording().communication()
    assert moved == pytest.approx((20 * MS, 15 * MS, 0.0))
    assert moved.hidden_share == pytest.approx(20 / 35)


def test_a_bucket_begins_to_travel_when_every_process_has_filled_it() -> None:
    late = recording(wait=12.0)
    starts = [
        transfer.start for transfer in late.transfers if transfer.bucket == 0 and transfer.step == 6
    ]
    assert starts == [pytest.approx(42 * MS)] * 2
    assert late.communication() == pytest.approx((8 * MS, 15 * MS, 0.0))
    assert late.last_rank() == (1, pytest.approx(12 * MS))


def test_time_in_which_sending_blocks_the_backward_pass_is_exposed() -> None:
    assert recording(blocked=6.0).communication() == pytest.approx((14 * MS, 21 * MS, 0.0))


def test_waiting_for_another_process_is_not_travelling() -> None:
    waiting = recording()
    for i, transfer in enumerate(waiting.transfers):
        if transfer.bucket == 1:
            waiting.transfers[i] = transfer._replace(start=transfer.start + 10 * MS)
    assert waiting.communication() == pytest.approx((20 * MS, 5 * MS, 10 * MS))


def test_bytes_are_compared_with_what_a_ring_sends() -> None:
    numbers = summary(recording())
    assert numbers["sent_bytes"] == 5 << 20
    assert numbers["ring_bytes"] == 5 << 20  # 2 (N - 1) / N is 1 for two processes
    assert (
        "a ring sends 2(N-1)/N of it from each process, 10.00 MiB in total; "
        "the network devices sent 10.50 MiB, 1.05 of that"
    ) in "\n".join(as_lines(summary(recording())))


def test_the_table_says_how_often_gradients_were_sent() -> None:
    regular = recording()
    assert regular.collectives() == [[2], [2]]
    lines = "\n".join(as_lines(summary(regular)))
    assert "collectives   2 per step, in its last micro-batch, for 2 buckets" in lines

    irregular = recording()
    irregular.transfers[0] = irregular.transfers[0]._replace(step=7)
    assert "differ between steps" in "\n".join(as_lines(summary(irregular)))


def test_the_trace_is_in_microseconds_by_rank_and_names_the_parameters() -> None:
    events = json.loads(json.dumps(as_trace(recording())))["traceEvents"]
    backward = [event for event in events if event["name"] == "backward" and event["pid"] == 1]
    assert [(event["ph"], event["ts"], event["dur"]) for event in backward] == [
        ("X", 20e3, 40e3),
        ("X", 120e3, 40e3),
    ]
    bucket = next(event for event in events if event["name"] == "bucket 0")
    assert bucket["args"]["parameters"] == ["h.1.w", "h.1.b"]
    assert bucket["args"]["sent_bytes"] == 4 << 20


class Boxes(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.legend: list[str] = []  # colours
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            self.found.append(dict(attributes))
        if tag == "i":
            self.legend.append(str(dict(attributes)["style"]).removeprefix("background:"))
        self.links += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href")] + [
            tag
        ] * (tag == "script")


def test_the_page_needs_nothing_else_and_draws_every_phase_and_bucket() -> None:
    page = page_of(recording(wait=12.0), "<x-ray>")
    drawn = Boxes()
    drawn.feed(page)
    assert not drawn.links
    steps, ranks, boxes_of_buckets = 2, 2, 2 * 2
    assert len(drawn.found) == steps * ranks * (len(PHASES) + boxes_of_buckets)
    assert all(
        0 <= float(box["x"] or -1) <= 1200.01 and float(box["width"] or -1) > 0
        for box in drawn.found
    )
    assert "&lt;x-ray&gt;" in page
    assert "h.1.w, h.1.b" in page


def test_every_phase_and_bucket_has_a_colour_of_its_own_which_the_legend_shows() -> None:
    drawn = Boxes()
    drawn.feed(page_of(recording(wait=12.0), "x-ray"))
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in drawn.legend)
    assert len({*drawn.legend}) == len(PHASES) + 2  # a bucket that travels, and one that waits
    assert {box["fill"] for box in drawn.found} == {*drawn.legend}


def test_every_picture_has_the_number_of_its_step_as_a_heading() -> None:
    page = page_of(recording(), "x-ray")
    assert re.findall("<h2>(.*)</h2>", page) == ["Step 6", "Step 7", "Table"]
    assert re.findall('aria-label="(.*)"', page) == ["timeline of step 6", "timeline of step 7"]
