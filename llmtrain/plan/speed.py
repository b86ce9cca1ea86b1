"""How long an update takes: what is computed, what is sent, and what of it hides behind what.

Collectives cost what a ring costs: ``2 (N - 1) / N x bytes / bandwidth + latency`` for an all-reduce, half of it to
gather or to reduce-scatter (Thakur et al. 2005, DOI 10.1177/1094342005051521). NCCL makes a ring for each network card
of a machine, and over many machines a tree where that is faster (Jeaugey 2019,
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4); gloo makes one ring.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.devices import Device
from llmtrain.parallel.fsdp import Sharding
from llmtrain.plan.memory import Memory, Part, spread

_FIRST_BUCKET, _BUCKET = 1.0, 25.0  # MiB; DDP's own, where no other was asked for
_AHEAD = 2  # units of FSDP


class Link(NamedTuple):
    bandwidth: float  # bytes/s that a process sends while it receives as many
    latency: float  # seconds that a message takes, however short


class Cluster(NamedTuple):
    per_machine: int  # processes
    inside: Link
    between: Link
    nccl: bool  # else gloo, which sends over TCP

    @property
    def payload(self) -> float:
        """The share of what goes between machines that is not headers (RFC 1191's 1,500 bytes, Ethernet's own 14)."""
        return 1.0 if self.nccl else 1448 / 1514

    def all_reduce(self, size: float, count: int, stride: int = 1) -> float:
        """Seconds for ``size`` bytes on each of ``count`` processes, neighbours in rank or ``stride`` apart."""
        if count == 1:
            return 0.0
        link, machines = self._among(count, stride)
        ring = 2 * (count - 1) / count * size / link.bandwidth + 2 * link.latency
        if not self.nccl or machines == 1:
            return ring
        hops = math.log2(machines) * self.between.latency + (count / machines) * self.inside.latency
        return min(ring, 2 * size / link.bandwidth + 2 * hops)

    def gather(self, size: float, count: int, stride: int = 1) -> float:
        """Seconds until each has all ``size`` bytes, of which each held a part; or its part of their sum."""
        if count == 1:
            return 0.0
        link, _ = self._among(count, stride)
        return (count - 1) / count * size / link.bandwidth + link.latency

    def send(self, size: float, stride: int) -> float:
        link = self.inside if stride < self.per_machine else self.between
        return size / link.bandwidth + link.latency

    def _among(self, count: int, stride: int) -> tuple[Link, int]:
        """One ring through all of them as a link, its latency that of once around; and how many machines it crosses."""
        here = max(1, min(count, self.per_machine // stride))  # of them in a machine
        machines = -(-count // here)
        if machines == 1:
            return Link(self.inside.bandwidth, (count - 1) * self.inside.latency), 1
        bandwidth = self.between.bandwidth * self.payload * (here if self.nccl else 1)
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
    """Of a device that reaches a share of its arithmetic; ``None`` where that of the model is unknown. What is computed
    again takes a third more, and is no work that MFU counts (Chowdhery et al. 2022, appendix B)."""
    subject = memory.subject
    if not subject.flops_per_token:
        return None
    row = subject.positions * subject.flops_per_token / (device.peak * mfu)
    forward, again = row / 3, bool(getattr(subject.settings, "gradient_checkpointing", False))
    trained = [part for part in memory.parts(1) if part.is_trained]
    # an update reads a weight, its gradient and its states, and writes all but the gradient
    touched = sum(part.numbers() * 4 * (3 + 2 * part.states) for part in trained)
    products = sum(_orthogonal(part.rows, part.row) for part in trained if part.states == 1)
    whole = products / (device.peak * mfu)
    return Compute(forward, row - forward + again * forward, touched / device.memory_bandwidth, whole)


def _orthogonal(m: int, n: int) -> float:
    """FLOPs of Muon's five iterations on a matrix, of three products each."""
    short, long = sorted((m, n))
    return 5 * (4 * short**2 * long + 2 * short**3)


def step_time(
    memory: Memory, compute: Compute, cluster: Cluster, sharding: Sharding, rows: int, accumulation: int
) -> Step:
    """Of an update with so many micro-batches of so many rows on each process that has rows of its own."""
    share = 1 / sharding.together
    forward, backward = rows * compute.forward * share, rows * compute.backward * share
    optimizer = compute.optimizer * share / sharding.shards + compute.whole + compute.other
    busy = accumulation * (forward + backward) + optimizer
    busy += compute.handling * bytes_sent(memory, sharding, rows, accumulation)
    if not spread(sharding):
        buckets = ddp_buckets(memory)
        each = [cluster.all_reduce(size, sharding.replicas) for size in buckets]
        ready = [backward * size / sum(buckets) for size in buckets]
        return Step(busy, sum(each), _behind(ready, each))
    parts = memory.parts(sharding.tensor)
    gathers, reductions, weights = _of_units(memory, parts, cluster, sharding)
    forward_late = _ahead([forward * weight for weight in weights], gathers)
    behind = [backward * weight for weight in reversed(weights)]
    fetched, reduced = gathers[::-1], reductions[::-1]
    backward_late = _ahead(behind, fetched)
    both = [one + other for one, other in zip(fetched, reduced, strict=True)]
    last_late = max(_ahead(behind, both), _behind(behind, reduced))
    times = 1 if memory.held_whole else accumulation  # that gradients are reduced
    sent = 2 * accumulation * sum(gathers) + times * sum(reductions)
    exposed = accumulation * forward_late + (accumulation - times) * backward_late + times * last_late
    if sharding.tensor > 1:
        size = rows * memory.subject.positions * memory.subject.width * (2 if memory.bf16 else 4)
        summed = accumulation * _sums(memory, sharding) * cluster.all_reduce(size, sharding.tensor)
        sent, exposed = sent + summed, exposed + summed
    if sharding.stages > 1:
        passed, idle = _pipeline(memory, cluster, sharding, rows, accumulation, forward + backward)
        sent, exposed = sent + passed, exposed + idle
    return Step(busy, sent, exposed)


def bytes_sent(memory: Memory, sharding: Sharding, rows: int, accumulation: int) -> float:
    """By a process in an update."""

    def ring(size: float, count: int) -> float:
        return (count - 1) / count * size

    parts = memory.parts(sharding.tensor)
    gradients = 4 * sum(part.numbers() for part in parts if part.is_trained) / sharding.stages
    if not spread(sharding):
        return 2 * ring(gradients, sharding.replicas)
    multiplied = {name for unit in memory.units if unit.multiplied and memory.bf16 for name in unit.names}
    weights = sum(part.numbers() * (2 if part.name in multiplied else 4) for part in parts) / sharding.stages
    times = 1 if memory.held_whole else accumulation
    reduced = ring(gradients, sharding.shards) + 2 * ring(gradients / sharding.shards, sharding.replicas)
    sent = 2 * accumulation * ring(weights, sharding.shards) + times * reduced
    hidden = rows * memory.subject.positions * memory.subject.width
    if sharding.tensor > 1:
        size = hidden * (2 if memory.bf16 else 4)
        sent += accumulation * _sums(memory, sharding) * 2 * ring(size, sharding.tensor)
    if sharding.stages > 1:
        sent += 2 * accumulation * hidden * 4
    return sent


def _sums(memory: Memory, sharding: Sharding) -> float:
    """Times that processes which cut matrices wait for each other in a micro-batch: two in each direction in a block,
    and one at either end."""
    return 4 * memory.subject.blocks / sharding.stages + 2


def ddp_buckets(memory: Memory) -> list[float]:
    """Bytes of DDP's, in the order in which they are full: gradients come last layer first."""
    settings = memory.subject.settings
    cap = (getattr(settings, "ddp_bucket_cap_mb", None) or _BUCKET) * 2**20
    first = (getattr(settings, "ddp_first_bucket_mb", None) or min(_FIRST_BUCKET, cap / 2**20)) * 2**20
    found, size, limit = [], 0.0, first
    for part in reversed([part for part in memory.parts(1) if part.is_trained]):
        size += part.numbers() * 4
        if size >= limit:
            found.append(size)
            size, limit = 0.0, cap
    return [*found, size] if size else found


def _behind(work: Sequence[float], sending: Sequence[float]) -> float:
    """How much longer than the work it takes until all is sent, one after the other, each when its work is done."""
    done = sent = 0.0
    for seconds, message in zip(work, sending, strict=True):
        done += seconds
        sent = max(done, sent) + message
    return max(0.0, sent - done)


def _ahead(work: Sequence[float], fetching: Sequence[float]) -> float:
    """How much longer than the work it takes where each part needs something first, which is fetched, one after the
    other, from when the last but one before it has begun: FSDP holds no more than it needs."""
    begun, done, fetched = [0.0, 0.0], 0.0, 0.0
    for seconds, message in zip(work, fetching, strict=True):
        fetched = max(fetched, begun[-_AHEAD]) + message
        begun.append(max(done, fetched))
        done = begun[-1] + seconds
    return done - sum(work)


def _of_units(
    memory: Memory, parts: list[Part], cluster: Cluster, sharding: Sharding
) -> tuple[list[float], list[float], list[float]]:
    """Of each unit that FSDP gathers and frees: seconds to gather it, to reduce its gradients, and its share of all
    that is computed. As the forward pass meets them."""
    numbers = {part.name: part.numbers() for part in parts}
    trained = {part.name for part in parts if part.is_trained}
    stride, held = sharding.together, sharding.stages
    found = []
    for unit in memory.units:
        whole = sum(numbers[name] for name in unit.names) / held
        gradient = 4 * sum(numbers[name] for name in unit.names if name in trained) / held
        size = whole * (2 if unit.multiplied and memory.bf16 else 4)
        reduction = cluster.gather(gradient, sharding.shards, stride)
        reduction += cluster.all_reduce(gradient / sharding.shards, sharding.replicas, stride * sharding.shards)
        found.append((cluster.gather(size, sharding.shards, stride), reduction, whole))
    total = sum(whole for _, _, whole in found) or 1
    gathers, reductions, wholes = zip(*reversed(found), strict=True)  # inner units, and so the last blocks, come first
    return list(gathers), list(reductions), [whole / total for whole in wholes]


def _pipeline(
    memory: Memory, cluster: Cluster, sharding: Sharding, rows: int, accumulation: int, work: float
) -> tuple[float, float]:
    """Seconds of sending in an update, and of waiting: while it fills and empties, a stage waits for each of the others
    once (Narayanan et al. 2019), and what is passed on is waited for by who computes next."""
    size = rows * memory.subject.positions * memory.subject.width * 4
    one = cluster.send(size, sharding.tensor)
    sent = 2 * accumulation * one
    return sent, (sharding.stages - 1) * (work + 2 * one) + sent
