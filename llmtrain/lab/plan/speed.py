"""Seconds of a step: computing, sending, and the sending that nothing hides.

Collectives cost what a ring costs: an all-gather or a reduce-scatter takes ``(N - 1) / N x bytes /
bandwidth + latency``, and an all-reduce is one of each (Thakur et al. 2005, DOI
10.1177/1094342005051521). NCCL makes a ring for each network card of a machine, and gloo makes one.
Over many machines NCCL adds up along a tree if that is faster (Jeaugey 2019,
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
"""

import math
from typing import NamedTuple

from llmtrain.devices import Device
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory

# If DDP chooses the size of its buckets, it closes the first early, to send it early.
_FIRST_BUCKET_MIB = 1.0
_BUCKET_MIB = 25.0
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


class Cluster(NamedTuple):
    """Machines with the same number of processes, and their links.

    Attributes:
        per_machine: processes of a machine.
        inside: a link between two processes of one machine.
        between: a link between two processes of different machines.
        nccl: whether NCCL sends. Otherwise gloo does.
    """

    per_machine: int
    inside: Link
    between: Link
    nccl: bool

    def all_gather(self, size: float, count: int, stride: int = 1) -> float:
        """Return the seconds to gather a tensor. A reduce-scatter takes as long.

        Args:
            size: bytes of the full tensor, of which each process has a shard.
            count: the number of processes.
            stride: the distance between their ranks.
        """
        machines = self._machines(count, stride)
        hops_inside = count - machines
        latency = (machines - 1) * self.between.latency + hops_inside * self.inside.latency
        return (count - 1) / count * size / self._bandwidth(count, machines) + latency

    def all_reduce(self, size: float, count: int, stride: int = 1) -> float:
        """Return the seconds to add up a tensor that each process has; see :meth:`all_gather`."""
        ring_seconds = 2 * self.all_gather(size, count, stride)
        machines = self._machines(count, stride)
        if not self.nccl or machines == 1:
            return ring_seconds

        latency = math.log2(machines) * self.between.latency
        latency += count / machines * self.inside.latency
        tree_seconds = 2 * size / self._bandwidth(count, machines) + 2 * latency
        return min(ring_seconds, tree_seconds)

    def _machines(self, count: int, stride: int) -> int:
        """Return over how many machines ``count`` processes are spread."""
        return -(-count // max(1, min(count, self.per_machine // stride)))

    def _bandwidth(self, count: int, machines: int) -> float:
        """Return the bytes/s at which ``count`` processes send around a ring."""
        if machines == 1:
            return self.inside.bandwidth
        rings = count / machines if self.nccl else 1
        return min(self.inside.bandwidth, rings * self.between.bandwidth)


class Compute(NamedTuple):
    """Seconds of a process that holds the full model and waits for no other process.

    Attributes:
        forward: the forward pass of a row. To compute all activations again takes as long.
        backward: the backward pass of a row, without activations that are computed again.
        optimizer: the part of the optimizer step that processes divide among them.
        muon: Muon's products in a step. Every process computes all of them.
        frozen: the forward passes of frozen models over a row.
    """

    forward: float
    backward: float
    optimizer: float
    muon: float = 0.0
    frozen: float = 0.0


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


def estimate_compute(memory: Memory, device: Device, mfu: float) -> Compute | None:
    """Return the seconds of a device, or ``None`` if the model's FLOPs are unknown.

    MFU does not count activations that are computed again as work (Chowdhery et al. 2022, appendix
    B).

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
    optimizer_bytes = 0.0
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
    # Half of what a frozen weight costs in a model that is trained, because no gradient passes it.
    frozen_flops = sum(frozen.recipe.flops_per_token for frozen in memory.frozen) / 2
    return Compute(
        forward=forward,
        backward=row - forward,
        optimizer=optimizer_bytes / device.memory_bandwidth,
        muon=muon_flops / flops_per_second,
        frozen=recipe.rows.positions * frozen_flops / flops_per_second,
    )


def step_time(
    memory: Memory,
    compute: Compute,
    cluster: Cluster,
    sharding: Sharding,
    rows: int,
    accumulation: int,
    recomputes: bool = False,
) -> Step:
    """Return the seconds of a step.

    Args:
        memory: the model.
        compute: how long it takes to compute.
        cluster: the machines and their links.
        sharding: how processes share the model.
        rows: rows per micro-batch.
        accumulation: micro-batches per step.
        recomputes: whether all blocks recompute their activations.
    """
    forward = rows * compute.forward
    backward = rows * compute.backward
    if recomputes:
        backward += forward
    computing = accumulation * (rows * compute.frozen + forward + backward)
    computing += compute.optimizer / sharding.shards + compute.muon

    if not sharding.is_sharded:
        buckets = [cluster.all_reduce(size, sharding.replicas) for size in ddp_buckets(memory)]
        # The last backward pass hides all buckets but the last, which is full when it ends.
        exposed = max(buckets[-1], sum(buckets) - backward)
        return Step(compute=computing, communication=sum(buckets), exposed=exposed)

    shards = sharding.shards
    gathers = [cluster.all_gather(unit.weights, shards) for unit in memory.units]
    reductions = [
        cluster.all_gather(unit.gradients, shards)
        + cluster.all_reduce(unit.gradients / shards, sharding.replicas, stride=shards)
        for unit in memory.units
    ]
    frozen_units = [unit for frozen_model in memory.frozen for unit in frozen_model.units]
    frozen_gathers = sum(
        cluster.all_gather(unit.weights, shards) for unit in frozen_units if not unit.stays_gathered
    )
    # The last unit is the rest of the model. Nothing hides that it is gathered for a forward pass,
    # nor that its gradients are reduced.
    in_forward = max(gathers[-1], sum(gathers) - forward)
    in_forward += max(0.0, frozen_gathers - rows * compute.frozen)
    in_backward = max(0.0, sum(gathers) - backward)
    with_reductions = max(reductions[-1], sum(gathers) + sum(reductions) - backward)

    reducing_batches = 1 if memory.reduces_once else accumulation
    exposed = accumulation * in_forward + reducing_batches * with_reductions
    exposed += (accumulation - reducing_batches) * in_backward
    return Step(
        compute=computing,
        communication=accumulation * (2 * sum(gathers) + frozen_gathers)
        + reducing_batches * sum(reductions),
        exposed=exposed,
    )


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
