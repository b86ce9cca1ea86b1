"""Seconds of an update: of computing, of sending, and of sending that hides behind computing.

Collectives cost what a ring costs: ``2 (N - 1) / N x bytes / bandwidth + latency`` for an all-reduce, half of it to
gather or to reduce-scatter (Thakur et al. 2005, DOI 10.1177/1094342005051521). NCCL makes a ring for each network card
of a machine, and over many machines a tree where that is faster (Jeaugey 2019,
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4); gloo makes one ring.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.devices import Device
from llmtrain.parallel.mesh import Sharding
from llmtrain.plan import pipeline
from llmtrain.plan.memory import Memory, spread

_FIRST_BUCKET = 1.0  # MiB; DDP's own
_AHEAD = 2  # units of FSDP


class Link(NamedTuple):
    """A way for bytes from one process to another."""

    bandwidth: float  # bytes/s that a process sends while it receives as many
    latency: float  # seconds that a message takes, however short


class Cluster(NamedTuple):
    """Machines of the same number of processes, and the links inside and between them."""

    per_machine: int  # processes
    inside: Link
    between: Link
    nccl: bool  # else gloo, which sends over TCP

    def all_reduce(self, size: float, count: int, stride: int = 1) -> float:
        """Return the seconds for ``size`` bytes on each of ``count`` processes, whose ranks are ``stride`` apart."""
        if count == 1:
            return 0.0
        link, machines = self._among(count, stride)
        ring = 2 * (count - 1) / count * size / link.bandwidth + 2 * link.latency
        if not self.nccl or machines == 1:
            return ring
        hops = math.log2(machines) * self.between.latency + (count / machines) * self.inside.latency
        return min(ring, 2 * size / link.bandwidth + 2 * hops)

    def gather(self, size: float, count: int, stride: int = 1) -> float:
        """Return the seconds to gather ``size`` bytes of which each has a shard, or to reduce and scatter as many."""
        if count == 1:
            return 0.0
        link, _ = self._among(count, stride)
        return (count - 1) / count * size / link.bandwidth + link.latency

    def send(self, size: float, stride: int) -> float:
        """Return the seconds for ``size`` bytes to the process whose rank is ``stride`` away."""
        link = self.inside if stride < self.per_machine else self.between
        return size / link.bandwidth + link.latency

    def _among(self, count: int, stride: int) -> tuple[Link, int]:
        """Return a ring through all as a link, its latency that of once around, and the machines that it crosses."""
        here = max(1, min(count, self.per_machine // stride))  # in a machine
        machines = -(-count // here)
        if machines == 1:
            return Link(self.inside.bandwidth, (count - 1) * self.inside.latency), 1
        # of gloo's packets of 1,500 bytes (RFC 1191) and Ethernet's own 14, what is not headers; NCCL has a ring a card
        bandwidth = self.between.bandwidth * (here if self.nccl else 1448 / 1514)
        bandwidth = min(self.inside.bandwidth, bandwidth) if here > 1 else bandwidth
        latency = (machines - 1) * self.between.latency + (count - machines) * self.inside.latency
        return Link(bandwidth, latency), machines


class Compute(NamedTuple):
    """Seconds of a process that waits for nobody and holds the whole model."""

    forward: float  # of a row
    backward: float  # of a row
    optimizer: float  # of an update, of which each process makes its part
    whole: float = 0.0  # of an update, which every process makes: Muon's products
    other: float = 0.0  # of an update: loading, counting, writing
    handling: float = 0.0  # of a byte that is sent, by the processors that compute: gloo's, which hides behind nothing


class Step(NamedTuple):
    """Seconds of an update."""

    compute: float
    communication: float  # on the busiest link
    exposed: float  # what of it, and of waiting for other stages, nothing hides

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def estimated(memory: Memory, device: Device, mfu: float) -> Compute | None:
    """Return the seconds of a device that reaches a share of its peak; ``None`` where the model's FLOPs are unknown.

    Activations that are computed again take a third more, and are no work that MFU counts (Chowdhery et al. 2022,
    appendix B).
    """
    subject = memory.subject
    if not subject.flops_per_token:
        return None
    row = subject.positions * subject.flops_per_token / (device.peak * mfu)
    forward = row / 3
    trained = [part for part in memory.parts(1) if part.is_trained]
    # an update reads a weight, its gradient and its states, and writes all but the gradient
    touched = sum(part.numbers() * 4 * (3 + 2 * part.states) for part in trained)
    muon = 0  # FLOPs of five iterations on a matrix, of three products each
    for short, long in (sorted((part.rows, part.row)) for part in trained if part.states == 1):
        muon += 5 * (4 * short**2 * long + 2 * short**3)
    backward = row - forward + subject.recomputes * forward
    return Compute(forward, backward, touched / device.memory_bandwidth, muon / (device.peak * mfu))


def step_time(
    memory: Memory,
    compute: Compute,
    cluster: Cluster,
    sharding: Sharding,
    rows: int,
    accumulation: int,
) -> Step:
    """Return the seconds of an update, in which a process computes ``accumulation`` micro-batches of ``rows`` rows."""
    share = 1 / sharding.model_parallel_size
    forward, backward = rows * compute.forward * share, rows * compute.backward * share
    busy = accumulation * (forward + backward)
    busy += compute.optimizer * share / sharding.shards + compute.whole + compute.other
    if compute.handling:
        busy += compute.handling * bytes_sent(memory, sharding, rows, accumulation)
    if not spread(sharding):
        buckets = ddp_buckets(memory)
        each = [cluster.all_reduce(size, sharding.replicas) for size in buckets]
        return Step(
            busy, sum(each), _behind([backward * size / sum(buckets) for size in buckets], each)
        )
    gathers, reductions, weights = _of_units(memory, cluster, sharding)
    forward_late = _ahead([forward * weight for weight in weights], gathers)
    behind = [backward * weight for weight in reversed(weights)]
    fetched, reduced = gathers[::-1], reductions[::-1]
    backward_late = _ahead(behind, fetched)
    both = [one + other for one, other in zip(fetched, reduced, strict=True)]
    last_late = max(_ahead(behind, both), _behind(behind, reduced))
    times = 1 if memory.held_whole else accumulation  # that gradients are reduced
    sent = 2 * accumulation * sum(gathers) + times * sum(reductions)
    exposed = (
        accumulation * forward_late + (accumulation - times) * backward_late + times * last_late
    )
    if sharding.tensor > 1:
        size = rows * memory.subject.positions * memory.subject.width * (2 if memory.bf16 else 4)
        sums = (
            4 * memory.subject.blocks + 2
        )  # two in each direction in a block, and one at either end
        summed = accumulation * sums * cluster.all_reduce(size, sharding.tensor)
        sent, exposed = sent + summed, exposed + summed
    if sharding.stages > 1:
        seconds_to_pass = cluster.send(pipeline.passed_bytes(memory.subject, rows), sharding.tensor)
        passed, idle = pipeline.waits(
            seconds_to_pass, sharding, accumulation, seconds_of_stage=forward + backward
        )
        sent, exposed = sent + passed, exposed + idle
    return Step(busy, sent, exposed)


def bytes_sent(memory: Memory, sharding: Sharding, rows: int, accumulation: int) -> float:
    """Return the bytes that a process sends in an update: its seconds over links of a byte a second."""
    link = Link(bandwidth=1.0, latency=0.0)
    cluster = Cluster(sharding.processes, link, link, nccl=False)
    return step_time(
        memory, Compute(0.0, 0.0, 0.0), cluster, sharding, rows, accumulation
    ).communication


def ddp_buckets(memory: Memory) -> list[float]:
    """Return the bytes of DDP's buckets, in the order in which they fill: gradients come last layer first."""
    cap = memory.subject.settings.parallel.ddp_bucket_cap_mb
    limit = min(_FIRST_BUCKET, cap) * 2**20
    buckets = []
    size = 0.0
    for part in reversed(memory.parts(1)):
        if not part.is_trained:
            continue
        size += part.numbers() * 4
        if size >= limit:
            buckets.append(size)
            size = 0.0
            limit = cap * 2**20
    if size:
        buckets.append(size)
    return buckets


def _behind(work: Sequence[float], sending: Sequence[float]) -> float:
    """Return how much longer than the work it takes until all is sent, one by one, each when its work is done."""
    done = sent = 0.0
    for seconds, message in zip(work, sending, strict=True):
        done += seconds
        sent = max(done, sent) + message
    return max(0.0, sent - done)


def _ahead(work: Sequence[float], fetching: Sequence[float]) -> float:
    """Return how much longer than the work it takes where each unit is fetched first, one after the other.

    A fetch begins when the last unit but one before it has begun: FSDP holds no more than it needs.
    """
    begun, done, fetched = [0.0, 0.0], 0.0, 0.0
    for seconds, message in zip(work, fetching, strict=True):
        fetched = max(fetched, begun[-_AHEAD]) + message
        begun.append(max(done, fetched))
        done = begun[-1] + seconds
    return done - sum(work)


def _of_units(
    memory: Memory, cluster: Cluster, sharding: Sharding
) -> tuple[list[float], list[float], list[float]]:
    """Return for each unit of FSDP the seconds to gather it and to reduce its gradients, and its share of the work.

    Units are in the order of the forward pass.
    """
    parts = memory.parts(sharding.tensor)
    numbers = {part.name: part.numbers() for part in parts}
    trained = {part.name for part in parts if part.is_trained}
    stride, shards = sharding.model_parallel_size, sharding.shards
    found = []
    for unit in memory.units:
        whole = sum(numbers[name] for name in unit.names) / sharding.stages
        gradient = 4 * sum(numbers[name] for name in unit.names & trained) / sharding.stages
        size = whole * (2 if unit.half else 4)
        reduction = cluster.gather(gradient, shards, stride)
        reduction += cluster.all_reduce(gradient / shards, sharding.replicas, stride * shards)
        found.append((cluster.gather(size, shards, stride), reduction, whole))
    total = sum(whole for _, _, whole in found) or 1
    gathers, reductions, wholes = zip(
        *reversed(found), strict=True
    )  # inner units, and so the last blocks, come first
    return list(gathers), list(reductions), [whole / total for whole in wholes]
