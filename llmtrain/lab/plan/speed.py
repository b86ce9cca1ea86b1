"""Seconds of a step: computing, sending, and the sending that nothing hides.

Collectives cost what a ring costs: an all-reduce takes ``2 (N - 1) / N x bytes / bandwidth +
latency``, an all-gather or a reduce-scatter half of it (Thakur et al. 2005, DOI
10.1177/1094342005051521). NCCL makes a ring for each network card of a machine. Over many machines
it uses a tree if that is faster (Jeaugey 2019,
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4). gloo makes one
ring.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.devices import Device
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory

# If DDP chooses the size of its buckets, it closes the first early, to send it early.
_FIRST_BUCKET_MIB = 1.0
_BUCKET_MIB = 25.0
# FSDP2 begins to gather a unit when the last unit but one before it begins to compute.
_PREFETCHED_UNITS = 2
# The part of an Ethernet frame that is TCP's payload. A frame has 14 bytes and a packet of 1,500
# bytes (RFC 1191), and 52 bytes of the packet are headers.
_TCP_PAYLOAD = 1448 / 1514
_MUON_ITERATIONS = 5
# Bytes that the AdamW of this package moves per element, with moments in 8 bits or in float32. On a
# CPU it takes 13 and 7 times as long as torch's fused AdamW, which moves 28 bytes.
_EIGHT_BIT_STEP_BYTES = 350
_COMPENSATED_STEP_BYTES = 185


class Link(NamedTuple):
    """A connection from one process to another.

    Attributes:
        bandwidth: bytes/s that a process sends while it receives as many.
        latency: seconds that the shortest message takes.
    """

    bandwidth: float
    latency: float


class _Ring(NamedTuple):
    """A ring through some processes.

    Attributes:
        bandwidth: bytes/s of its slowest link.
        latency: seconds of the shortest message for one way around.
        machines: the number of machines that it crosses.
    """

    bandwidth: float
    latency: float
    machines: int


class Cluster(NamedTuple):
    """Machines with the same number of processes, and their links.

    Attributes:
        per_machine: processes of a machine.
        inside: a link between two processes of one machine.
        between: a link between two processes of different machines.
        nccl: whether NCCL sends. Otherwise gloo does, over TCP.
    """

    per_machine: int
    inside: Link
    between: Link
    nccl: bool

    def all_reduce(self, size: float, count: int, stride: int = 1) -> float:
        """Return the seconds to add up a tensor over some processes.

        Args:
            size: bytes of the tensor, which each process has.
            count: the number of processes.
            stride: the distance between their ranks.
        """
        if count == 1:
            return 0.0

        ring = self._ring(count, stride)
        ring_seconds = 2 * (count - 1) / count * size / ring.bandwidth + 2 * ring.latency
        if not self.nccl or ring.machines == 1:
            return ring_seconds

        hop_seconds = math.log2(ring.machines) * self.between.latency
        hop_seconds += (count / ring.machines) * self.inside.latency
        tree_seconds = 2 * size / ring.bandwidth + 2 * hop_seconds
        return min(ring_seconds, tree_seconds)

    def all_gather(self, size: float, count: int) -> float:
        """Return the seconds to gather a tensor. A reduce-scatter takes as long.

        Args:
            size: bytes of the full tensor, of which each process has a shard.
            count: the number of processes.
        """
        if count == 1:
            return 0.0
        ring = self._ring(count, stride=1)
        return (count - 1) / count * size / ring.bandwidth + ring.latency

    def _ring(self, count: int, stride: int) -> _Ring:
        """Return the ring through ``count`` processes whose ranks are ``stride`` apart."""
        count_per_machine = max(1, min(count, self.per_machine // stride))
        machines = -(-count // count_per_machine)
        if machines == 1:
            latency = (count - 1) * self.inside.latency
            return _Ring(bandwidth=self.inside.bandwidth, latency=latency, machines=1)

        if self.nccl:
            bandwidth = self.between.bandwidth * count_per_machine  # a ring for each network card
        else:
            bandwidth = self.between.bandwidth * _TCP_PAYLOAD
        if count_per_machine > 1:
            bandwidth = min(self.inside.bandwidth, bandwidth)
        latency = (machines - 1) * self.between.latency + (count - machines) * self.inside.latency
        return _Ring(bandwidth=bandwidth, latency=latency, machines=machines)


class Compute(NamedTuple):
    """Seconds of a process that holds the full model and waits for no other process.

    Attributes:
        forward: the forward pass of a row.
        backward: the backward pass of a row, without activations that are computed again.
        optimizer: the part of the optimizer step that processes divide among them.
        recompute: computing the activations of a row again, in all blocks.
        muon: Muon's products in a step. Every process computes all of them.
        other: loading, counting and writing in a step.
        per_sent_byte: seconds of the computing processors to send a byte. gloo runs on them, so
            nothing hides this time.
    """

    forward: float
    backward: float
    optimizer: float
    recompute: float = 0.0
    muon: float = 0.0
    other: float = 0.0
    per_sent_byte: float = 0.0


class Step(NamedTuple):
    """Seconds of a step.

    Attributes:
        compute: seconds of computing.
        communication: seconds of sending, on the busiest link.
        exposed: the part of sending that no computation hides.
    """

    compute: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class _Sending(NamedTuple):
    """Seconds of a step in which a process sends.

    Attributes:
        seconds: all of them.
        exposed: those that no computation hides.
    """

    seconds: float
    exposed: float


def estimate_compute(memory: Memory, device: Device, mfu: float) -> Compute | None:
    """Return the seconds of a device, or ``None`` if the model's FLOPs are unknown.

    To compute activations again takes as long as the forward pass. MFU does not count that as work
    (Chowdhery et al. 2022, appendix B).

    Args:
        memory: the model.
        device: the device.
        mfu: the share of its peak that the device reaches.
    """
    recipe = memory.recipe
    if not recipe.flops_per_token:
        return None

    flops_per_second = device.peak * mfu
    row = recipe.rows.positions * recipe.flops_per_token / flops_per_second
    forward = row / 3

    trained = [parameter for parameter in memory.parameters if parameter.is_trained]
    optimizer_bytes = 0
    for p in trained:
        if p.is_muon or not (memory.has_bf16_weights or memory.optimizer.has_chunks):
            # It reads each weight, its gradient and its states, and writes all but the gradient.
            optimizer_bytes += 3 * p.numel() * p.element_bytes + 2 * p.state_bytes()
        elif memory.optimizer.has_chunks:
            optimizer_bytes += p.numel() * _EIGHT_BIT_STEP_BYTES
        else:
            optimizer_bytes += p.numel() * _COMPENSATED_STEP_BYTES

    # Each iteration on a matrix makes three products.
    muon_flops = 0
    for p in trained:
        if p.is_muon:
            short, long = sorted((p.rows, p.row_numel))
            muon_flops += _MUON_ITERATIONS * (4 * short**2 * long + 2 * short**3)
    return Compute(
        forward=forward,
        backward=row - forward,
        recompute=forward,
        optimizer=optimizer_bytes / device.memory_bandwidth,
        muon=muon_flops / flops_per_second,
    )


def step_time(
    memory: Memory,
    compute: Compute,
    cluster: Cluster,
    sharding: Sharding,
    rows: int,
    accumulation: int,
    recomputed_share: float = 0.0,
) -> Step:
    """Return the seconds of a step.

    Args:
        memory: the model.
        compute: how long it takes to compute.
        cluster: the machines and their links.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
        recomputed_share: the share of the blocks that compute their activations again.
    """
    forward = rows * compute.forward
    backward = rows * (compute.backward + recomputed_share * compute.recompute)

    computing = accumulation * (forward + backward)
    computing += compute.optimizer / sharding.shards + compute.muon + compute.other
    if compute.per_sent_byte:
        computing += compute.per_sent_byte * bytes_sent(memory, sharding, accumulation)

    sending = _sending(
        memory,
        cluster,
        sharding,
        accumulation=accumulation,
        forward=forward,
        backward=backward,
    )
    return Step(compute=computing, communication=sending.seconds, exposed=sending.exposed)


def bytes_sent(memory: Memory, sharding: Sharding, accumulation: int) -> float:
    """Return the bytes that a process sends in a step.

    Args:
        memory: the model.
        sharding: how processes share the model.
        accumulation: micro-batches per step.
    """
    # Over links of one byte a second, the bytes are the seconds.
    link = Link(bandwidth=1.0, latency=0.0)
    cluster = Cluster(sharding.processes, inside=link, between=link, nccl=False)
    sending = _sending(
        memory,
        cluster,
        sharding,
        accumulation=accumulation,
        forward=0.0,
        backward=0.0,
    )
    return sending.seconds


def _sending(
    memory: Memory,
    cluster: Cluster,
    sharding: Sharding,
    *,
    accumulation: int,
    forward: float,
    backward: float,
) -> _Sending:
    """Return the seconds of a step in which a process sends.

    Args:
        memory: the model.
        cluster: the machines and their links.
        sharding: how processes share the model.
        accumulation: micro-batches per step.
        forward: seconds per forward pass.
        backward: seconds per backward pass.
    """
    if not sharding.is_sharded:
        return _ddp_sending(memory, cluster, sharding.replicas, backward)

    return _fsdp_sending(
        memory,
        cluster,
        sharding,
        accumulation=accumulation,
        forward=forward,
        backward=backward,
    )


# --- DDP


def _ddp_sending(memory: Memory, cluster: Cluster, replicas: int, backward: float) -> _Sending:
    """Return the seconds in which DDP sends its buckets, in the last backward pass."""
    sizes = ddp_buckets(memory)
    sending = [cluster.all_reduce(size, replicas) for size in sizes]
    computing = [backward * size / sum(sizes) for size in sizes]
    return _Sending(seconds=sum(sending), exposed=_exposed_sends(computing, sending))


def ddp_buckets(memory: Memory) -> list[float]:
    """Return the bytes of DDP's buckets, in the order in which they fill.

    The gradients of the last layers come first.
    """
    chosen_mib = memory.recipe.settings.parallel.ddp_bucket_cap_mb
    limit = (chosen_mib or _FIRST_BUCKET_MIB) * 2**20
    buckets = []
    size = 0.0
    for parameter in reversed(memory.parameters):
        if not parameter.is_trained:
            continue
        size += parameter.numel() * parameter.element_bytes
        if size >= limit:
            buckets.append(size)
            size = 0.0
            limit = (chosen_mib or _BUCKET_MIB) * 2**20
    if size:
        buckets.append(size)
    return buckets


def _exposed_sends(computing: Sequence[float], sending: Sequence[float]) -> float:
    """Return how long messages are still being sent when all computing is done.

    A message is sent when its part is computed and all earlier messages have been sent.

    Args:
        computing: seconds to compute each part.
        sending: seconds to send each part.
    """
    computed = 0.0
    sent = 0.0
    for compute_seconds, send_seconds in zip(computing, sending, strict=True):
        computed += compute_seconds
        sent = max(computed, sent) + send_seconds
    return max(0.0, sent - computed)


# --- FSDP2


class _UnitSeconds(NamedTuple):
    """The cost of one FSDP2 unit in a micro-batch.

    Attributes:
        gather: seconds to gather its weights.
        reduce: seconds to reduce its gradients.
        share: its share of the model's elements, and so of the computing.
    """

    gather: float
    reduce: float
    share: float


def _fsdp_sending(
    memory: Memory,
    cluster: Cluster,
    sharding: Sharding,
    *,
    accumulation: int,
    forward: float,
    backward: float,
) -> _Sending:
    """Return the seconds in which FSDP2 gathers weights and reduces gradients.

    Args:
        memory: the model.
        cluster: the machines and their links.
        sharding: how processes share the model.
        accumulation: micro-batches per step.
        forward: seconds per forward pass.
        backward: seconds per backward pass.
    """
    units = _unit_seconds(memory, cluster, sharding)
    gathers = [unit.gather for unit in units]
    reductions = [unit.reduce for unit in units]

    computing = [forward * unit.share for unit in units]
    exposed_in_forward = _exposed_prefetches(computing, gathers)

    # The backward pass goes through the units in reverse. Without a reduction, it only gathers.
    computing = [backward * unit.share for unit in reversed(units)]
    gathers_in_backward = gathers[::-1]
    reductions_in_backward = reductions[::-1]
    exposed_in_backward = _exposed_prefetches(computing, gathers_in_backward)

    # With reductions, it waits for whichever is later: the gathers, which share the link with the
    # reductions, or the last reductions.
    both = [
        gather + reduction
        for gather, reduction in zip(gathers_in_backward, reductions_in_backward, strict=True)
    ]
    exposed_with_reductions = max(
        _exposed_prefetches(computing, both),
        _exposed_sends(computing, reductions_in_backward),
    )

    reducing_batches = 1 if memory.reduces_once else accumulation
    return _Sending(
        seconds=2 * accumulation * sum(gathers) + reducing_batches * sum(reductions),
        exposed=(
            accumulation * exposed_in_forward
            + (accumulation - reducing_batches) * exposed_in_backward
            + reducing_batches * exposed_with_reductions
        ),
    )


def _unit_seconds(memory: Memory, cluster: Cluster, sharding: Sharding) -> list[_UnitSeconds]:
    """Return the cost of each FSDP2 unit, in the order of the forward pass."""
    unit_numel = [sum(p.numel() for p in unit.parameters) for unit in memory.units]
    model_numel = sum(unit_numel) or 1

    shards = sharding.shards
    units = []
    for unit, count in zip(memory.units, unit_numel, strict=True):
        reduce = cluster.all_gather(unit.gradients, shards)
        reduce += cluster.all_reduce(unit.gradients / shards, sharding.replicas, stride=shards)
        units.append(
            _UnitSeconds(
                gather=cluster.all_gather(unit.weights, shards),
                reduce=reduce,
                share=count / model_numel,
            )
        )

    # `memory.units` begins with inner units, and so with the last blocks.
    return units[::-1]


def _exposed_prefetches(computing: Sequence[float], gathering: Sequence[float]) -> float:
    """Return how long the computing of units waits for their weights.

    Units are gathered one after the other. FSDP2 holds no more weights than it needs: it begins to
    gather a unit when the last unit but one before it begins to compute.

    Args:
        computing: seconds to compute each unit.
        gathering: seconds to gather each unit.
    """
    begun = [0.0] * _PREFETCHED_UNITS
    computed = 0.0
    gathered = 0.0
    for compute_seconds, gather_seconds in zip(computing, gathering, strict=True):
        gathered = max(gathered, begun[-_PREFETCHED_UNITS]) + gather_seconds
        begun.append(max(computed, gathered))
        computed = begun[-1] + compute_seconds
    return computed - sum(computing)
