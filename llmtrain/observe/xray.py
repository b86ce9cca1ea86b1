"""Records some steps: when each process does what, and which gradients travel meanwhile.

The recording is ``xray/recording.json`` in the run folder. ``llmtrain xray RUN`` draws it.
"""

import itertools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future

from llmtrain.console import say
from llmtrain.files import JsonObject, write_json
from llmtrain.parallel.ranks import Ranks
from llmtrain.phase_names import PHASES
from llmtrain.phases import Mark, Phases, PhaseStart

# The phase in which the loop gets ready for its first step. Its passes are part of no step.
WARM_UP_PHASE = "the warm-up"


class _MarkedTransfer(NamedTuple):
    """A bucket of gradients that this process sent. Its times are still marks."""

    phase_index: int  # of the recorded phase in which the bucket was full
    bucket: int
    sent_bytes: int  # summed over the processes
    ready: Mark  # when the bucket was full on this process
    blocked: float  # seconds of the backward pass that sending took
    end: Mark


class XRay:
    """Records some steps.

    After the last of them, :attr:`recording` is there on rank 0.

    Args:
        ranks: the ranks of the run.
        phases: the phases of this process.
        model: the model that ``accelerator.prepare`` returned.
        steps: the steps to record; the first of a run is 1.
        folder: a folder to which rank 0 writes the recording.
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
        self.recording: JsonObject | None = None

        self._clock = phases.clock
        self._parameter_names: dict[torch.Tensor, str] = {
            parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()
        }

        self._is_recording = False
        # All times are measured from this moment. It is marked again when the recording begins,
        # with `Clock.zero`, which first waits until the device has nothing to do.
        self._zero = self._clock.now()
        self._clock_offset = 0.0  # seconds by which this process's clock is ahead of rank 0's
        self._cost = 0.0  # seconds that recording itself took

        self._phase_starts: list[PhaseStart] = []
        self._transfers: list[_MarkedTransfer] = []
        self._buckets: dict[int, JsonObject] = {}

    def at_step_boundary(self, step: int) -> None:
        """Begin or end the recording if it is time.

        All ranks call this before the first step and after every step.

        Args:
            step: steps made so far.
        """
        if step + 1 == self.steps.start:
            self._clock_offset = _clock_offset(self.ranks)
            self._zero = self._clock.zero()
            self.phases.recording = self._phase_starts
            self._is_recording = True
        elif self._is_recording and step == self.steps[-1]:
            self.phases.begin("other")  # ends the phase before it
            self.phases.recording = None
            self._is_recording = False
            self._gather()

    def on_bucket(
        self,
        bucket: GradBucket,
        send: Callable[[GradBucket], Future[torch.Tensor]],
    ) -> Future[torch.Tensor]:
        """Send a full bucket of gradients, and record its transfer.

        Args:
            bucket: the bucket.
            send: averages the bucket over the ranks.
        """
        # If the recording begins with the first step of a resumed run, the warm-up before that step
        # sends buckets, too.
        if not self._is_recording or self.phases.phase == WARM_UP_PHASE:
            return send(bucket)

        start = time.perf_counter()
        number = bucket.index()
        phase_index = len(self._phase_starts) - 1
        names = [self._parameter_names.get(parameter, "?") for parameter in bucket.parameters()]
        # DDP rebuilds its buckets after the first step of a run, and numbers them from 0 again. If
        # that step is recorded, too, the later bucket of each number replaces the earlier one here.
        size = bucket.buffer().nbytes
        self._buckets[number] = {"size": size, "parameters": names}

        ready = self._clock.now()
        send_start = time.perf_counter()
        future = send(bucket)
        send_seconds = time.perf_counter() - send_start

        def on_arrival(done: Future[torch.Tensor]) -> torch.Tensor:
            transfer = _MarkedTransfer(
                phase_index=phase_index,
                bucket=number,
                sent_bytes=size,
                ready=ready,
                # If the clock uses events, the call to send only adds work to the device's queue.
                blocked=0.0 if self._clock.uses_events else send_seconds,
                end=self._clock.now(),
            )
            self._transfers.append(transfer)
            return done.value()

        future = future.then(on_arrival)
        self._cost += time.perf_counter() - start - send_seconds
        return future

    def _gather(self) -> None:
        """Gather the recordings of all processes; all ranks call this."""
        recordings = self.ranks.on_all(self._local_recording)
        if not self.ranks.is_main:
            return

        spans = itertools.chain.from_iterable(recording["spans"] for recording in recordings)
        transfers = itertools.chain.from_iterable(
            recording["transfers"] for recording in recordings
        )
        self.recording = {
            "processes": len(recordings),
            "spans": list(spans),
            "transfers": list(transfers),
            "buckets": self._buckets,
            "cost": max(recording["cost"] for recording in recordings),
        }
        if self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            write_json(self.folder / "recording.json", self.recording, durable=False)
            say("x-ray", f"steps are recorded; to see them: llmtrain xray {self.folder.parent}")

    def _local_recording(self) -> JsonObject:
        """Return what this process has recorded: its phases, and its transfers."""
        step = self.steps.start - 1
        micro_batch = -1  # before the first forward pass of a step
        phases: list[JsonObject] = []
        for phase, mark in self._phase_starts:
            if phase == "data":  # a step begins
                step += 1
                micro_batch = -1
            if phase == "forward":
                micro_batch += 1
            phases.append(
                {
                    "rank": self.ranks.rank,
                    "step": step,
                    "micro_batch": micro_batch,
                    "phase": phase,
                    "start": self._seconds(mark),
                }
            )

        # Each phase ends when the next one begins.
        spans = []
        for span, next_span in itertools.pairwise(phases):
            if span["phase"] in PHASES:
                spans.append({**span, "end": next_span["start"]})

        transfers = []
        for marked in self._transfers:
            span = phases[marked.phase_index]
            transfers.append(
                {
                    "rank": self.ranks.rank,
                    "step": span["step"],
                    "micro_batch": span["micro_batch"],
                    "bucket": marked.bucket,
                    "sent_bytes": marked.sent_bytes,
                    "ready": self._seconds(marked.ready),
                    "blocked": marked.blocked,
                    "end": self._seconds(marked.end),
                }
            )
        return {
            "spans": spans,
            "transfers": transfers,
            "cost": self._cost / len(self.steps),  # seconds that recording took, per step
        }

    def _seconds(self, mark: Mark) -> float:
        """Return when a mark passed, by the clock of rank 0."""
        # `since` reads this process's clock, which is ahead of rank 0's by the offset.
        return self._clock.since(self._zero, mark) - self._clock_offset


def _clock_offset(ranks: Ranks) -> float:
    """Return the seconds by which this process's clock is ahead of rank 0's.

    Processes on one machine share a clock. Otherwise each reads its clock when all have met.
    """
    hosts = ranks.on_all(platform.node)
    now = time.perf_counter()
    first_rank_now = ranks.on_main(lambda: now)
    is_on_first_machine = platform.node() == hosts[0]
    return 0.0 if is_on_first_machine else now - first_rank_now
