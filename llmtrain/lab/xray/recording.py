"""The recording of some steps that a run with ``--xray_steps`` has made."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from llmtrain.errors import UserError
from llmtrain.files import JsonObject, read_object
from llmtrain.phase_names import PHASES

Interval: TypeAlias = tuple[float, float]  # start and end, in seconds


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
    sent_bytes: int  # summed over the processes
    ready: float  # when the bucket was full on this process
    blocked: float  # seconds of the backward pass that sending took
    end: float
    start: float = 0.0  # when the bucket was full on every process; Recording computes it

    @property
    def key(self) -> tuple[int, int, int]:
        """The step, micro-batch and bucket, which identify a transfer on each process."""
        return (self.step, self.micro_batch, self.bucket)


class Bucket(NamedTuple):
    """Gradients that DDP sends together."""

    size: int  # bytes
    parameters: list[str]


class Communication(NamedTuple):
    """Mean seconds of a step on one process."""

    hidden: float  # in which buckets travelled while the backward pass continued
    exposed: float  # in which buckets travelled and the backward pass did not continue
    waited: float  # in which the process waited for others to fill their buckets

    @property
    def hidden_share(self) -> float:
        """The hidden share of the seconds in which buckets travelled."""
        return self.hidden / max(self.hidden + self.exposed, 1e-12)


@dataclass
class Recording:
    """What all processes did in some steps.

    Attributes:
        processes: the number of processes.
        spans: the phases of all processes.
        transfers: the buckets that the processes sent.
        buckets: the buckets of gradients by number.
        cost: seconds per step that recording took, on the slowest process.
        steps: their numbers.
    """

    processes: int
    spans: list[Span]
    transfers: list[Transfer]
    buckets: dict[int, Bucket]
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

    @classmethod
    def read(cls, run: Path) -> "Recording":
        """Read the recording in a run folder.

        Raises:
            UserError: if there is none that can be read.
        """
        try:
            recording = cls.from_json(read_object(run / "xray" / "recording.json"))
            has_all_ranks = {span.rank for span in recording.spans} == {*range(recording.processes)}
        except (KeyError, TypeError, ValueError, AttributeError):  # absent, or of another version
            has_all_ranks = False
        if not has_all_ranks:
            raise UserError(
                f"{run} has no readable recording of steps: start the run with --xray_steps A:B, "
                "or name a recipe."
            )
        return recording

    @classmethod
    def from_json(cls, content: JsonObject) -> "Recording":
        """Return the recording that a run has written as JSON."""
        buckets = {int(number): Bucket(**item) for number, item in content["buckets"].items()}
        return cls(
            processes=content["processes"],
            spans=[Span(**span) for span in content["spans"]],
            transfers=[Transfer(**transfer) for transfer in content["transfers"]],
            buckets=buckets,
            cost=content["cost"],
        )

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
        steps = self.steps if step is None else [step]
        by_process = []
        for recorded_step in steps:
            for rank in range(self.processes):
                by_process.append(self._communication_of(recorded_step, rank))
        return Communication(
            hidden=statistics.mean(seconds.hidden for seconds in by_process),
            exposed=statistics.mean(seconds.exposed for seconds in by_process),
            waited=statistics.mean(seconds.waited for seconds in by_process),
        )

    def _communication_of(self, step: int, rank: int) -> Communication:
        """Return the seconds of one process in one step."""
        transfers = self.sent_by(step, rank)
        travelling = _union((transfer.start, transfer.end) for transfer in transfers)
        waiting = [
            (span.start, span.end)
            for span in self.spans
            if (span.step, span.rank, span.phase) == (step, rank, "exchange")
        ]

        travelling_while_waiting = _overlap(travelling, waiting)
        exposed = travelling_while_waiting + sum(transfer.blocked for transfer in transfers)
        return Communication(
            hidden=max(0.0, _total(travelling) - exposed),
            exposed=exposed,
            waited=max(0.0, _total(waiting) - travelling_while_waiting),
        )

    def last_rank(self) -> tuple[int, float]:
        """Return the process that fills the first bucket last, in the mean over the steps.

        Returns:
            Its rank, and the mean seconds after the process that fills it first.
        """
        lags_by_rank: list[list[float]] = [[] for _ in range(self.processes)]
        for step in self.steps:
            ready = []
            for rank in range(self.processes):
                sent = [transfer.ready for transfer in self.sent_by(step, rank)]
                ready.append(min(sent, default=0.0))
            first = min(ready)
            for lags, seconds in zip(lags_by_rank, ready, strict=True):
                lags.append(seconds - first)

        mean_lags = [statistics.mean(lags) for lags in lags_by_rank]
        rank = max(range(self.processes), key=mean_lags.__getitem__)
        return rank, mean_lags[rank]

    def bucket_times(self, number: int) -> dict[str, float]:
        """Return when a bucket was ``ready``, ``began`` to travel and ``ended``, on rank 0.

        The times are mean seconds since the step began.
        """
        own_spans = [span for span in self.spans if span.rank == 0]
        step_starts = {
            step: min(span.start for span in own_spans if span.step == step) for step in self.steps
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
