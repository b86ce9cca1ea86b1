"""The figures and pictures of an x-ray, for a recording with known times."""

import itertools
import re
from html.parser import HTMLParser

import pytest

from llmtrain.lab.xray.recording import Bucket, Recording, Span, Transfer
from llmtrain.lab.xray.timeline import as_html, as_lines, summary
from llmtrain.phase_names import PHASES

MS = 1e-3


# The phases of each step: their first and last millisecond.
PHASE_TIMES = {
    "data": (0, 5),
    "count": (5, 10),
    "forward": (10, 20),
    "backward": (20, 60),
    "exchange": (60, 75),
    "norm": (75, 78),
    "optimizer": (78, 95),
    "other": (95, 100),
}
# The bytes of each bucket, and the milliseconds when it is filled and when it has been sent.
BUCKET_TIMES = [(4 << 20, 30, 50), (1 << 20, 60, 75)]
STEPS = (6, 7)
RANKS = (0, 1)


def recording(wait: float = 0.0, blocked: float = 0.0) -> Recording:
    """Make the recording of two processes and two steps of 100 ms.

    Bucket 0 is filled at 30 ms, and its transfer ends at 50 ms. That of bucket 1 takes from 60 to
    75 ms. Backward takes from 20 to 60 ms.

    Args:
        wait: milliseconds by which rank 1 fills bucket 0 later.
        blocked: milliseconds for which sending bucket 0 blocks the backward pass.
    """
    assert [*PHASE_TIMES] == [*PHASES]
    spans = []
    transfers = []
    for step, rank in itertools.product(STEPS, RANKS):
        start_of_step = (step - STEPS[0]) * 100 * MS
        for phase, (start, end) in PHASE_TIMES.items():
            span = Span(
                rank=rank,
                step=step,
                micro_batch=-1 if phase in ("data", "count") else 0,
                phase=phase,
                start=start_of_step + start * MS,
                end=start_of_step + end * MS,
            )
            spans.append(span)

        for bucket, (sent_bytes, ready, end) in enumerate(BUCKET_TIMES):
            is_first = bucket == 0
            transfer = Transfer(
                rank=rank,
                step=step,
                micro_batch=0,
                bucket=bucket,
                sent_bytes=sent_bytes,
                ready=start_of_step + (ready + wait * rank * is_first) * MS,
                blocked=blocked * is_first * MS,
                end=start_of_step + end * MS,
            )
            transfers.append(transfer)

    return Recording(
        processes=len(RANKS),
        spans=spans,
        transfers=transfers,
        buckets={0: Bucket(4 << 20, ["h.1.w", "h.1.b"]), 1: Bucket(1 << 20, ["h.0.w"])},
        cost=0.5 * MS,
    )


# --- communication: seconds hidden, exposed and waiting


def test_transfers_during_the_backward_pass_are_hidden_and_others_are_exposed() -> None:
    communication = recording().communication()

    assert communication == pytest.approx((20 * MS, 15 * MS, 0.0))
    assert communication.hidden_share == pytest.approx(20 / 35)
    blocking = recording(blocked=6.0).communication()
    assert blocking == pytest.approx((14 * MS, 21 * MS, 0.0)), "it blocks the backward pass"


def test_a_transfer_begins_when_every_process_has_filled_the_bucket() -> None:
    late = recording(wait=12.0)

    starts = [
        transfer.start for transfer in late.transfers if transfer.bucket == 0 and transfer.step == 6
    ]
    assert starts == [pytest.approx(42 * MS)] * len(RANKS)
    assert late.communication() == pytest.approx((8 * MS, 15 * MS, 0.0))
    assert late.last_rank() == (1, pytest.approx(12 * MS))


def test_waiting_for_another_process_is_no_transfer() -> None:
    recorded = recording()
    for index, transfer in enumerate(recorded.transfers):
        if transfer.bucket == 1:
            later = transfer._replace(start=transfer.start + 10 * MS)
            recorded.transfers[index] = later

    assert recorded.communication() == pytest.approx((20 * MS, 5 * MS, 10 * MS))


def test_a_process_waits_in_its_own_exchange() -> None:
    recorded = recording()
    for index, span in enumerate(recorded.spans):
        if span.phase == "exchange" and span.rank == 1:
            recorded.spans[index] = span._replace(end=span.end + 10 * MS)

    assert recorded.communication() == pytest.approx((20 * MS, 15 * MS, 5 * MS))


# --- the table


def test_sent_bytes_are_compared_with_those_of_a_ring() -> None:
    numbers = summary(recording())

    assert numbers["sent_bytes"] == 5 << 20
    ring_factor = 2 * (len(RANKS) - 1) / len(RANKS)
    assert numbers["ring_bytes"] == ring_factor * (5 << 20)
    text = "a ring sends 2(N-1)/N of it from each process, 10.00 MiB in total"
    assert text in "\n".join(as_lines(numbers))


def test_the_first_line_says_that_the_gathers_of_fsdp2_are_not_shown() -> None:
    sharded = recording()
    assert "FSDP2" not in as_lines(summary(sharded))[0]

    sharded.transfers = []
    sharded.buckets = {}
    assert "the gathers of FSDP2 are not shown" in as_lines(summary(sharded))[0]


# --- the page


class PageReader(HTMLParser):
    """Collects the rectangles of a page, the colors of its legend, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rectangles: list[dict[str, str | None]] = []
        self.legend_colors: set[str] = set()
        self.resources: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "rect":
            self.rectangles.append(values)
        if tag == "i":
            self.legend_colors.add(str(values["style"]).removeprefix("background:"))
        if tag == "script" or "src" in values or "href" in values:
            self.resources.append(tag)


def test_the_page_draws_every_phase_and_bucket_and_loads_nothing() -> None:
    recorded = recording(wait=12.0)
    lines = as_lines(summary(recorded))
    title = "<script>x-ray</script>"
    text = as_html(recorded, lines, title)
    page = PageReader(text)

    assert page.resources == []
    rectangles_of_buckets = 2 * 2  # each of two buckets waits, then travels
    rectangles_per_rank = len(PHASES) + rectangles_of_buckets
    assert len(page.rectangles) == len(STEPS) * len(RANKS) * rectangles_per_rank
    for rectangle in page.rectangles:
        assert 0 <= float(rectangle["x"] or -1) <= 1200.01
        assert float(rectangle["width"] or -1) > 0
    assert "h.1.w, h.1.b" in text
    # Rank 0 waits 12 of 100 ms for bucket 0. A box without a length is still seen.
    waits = {box["width"] for box in page.rectangles if box["fill"] == "#f3c6c6"}
    assert waits == {"0.4", f"{0.12 * 1130:.1f}"}
    assert re.findall("<h2>(.*)</h2>", text) == ["Step 6", "Step 7", "Table"]

    states_of_buckets = 2
    assert len(page.legend_colors) == len(PHASES) + states_of_buckets
    assert {rectangle["fill"] for rectangle in page.rectangles} == page.legend_colors
