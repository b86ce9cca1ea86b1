"""The seconds of collectives, and how many of them are hidden behind work, as computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from llmtrain.lab.plan.speed import (
    Cluster,
    Compute,
    Link,
    Step,
    ddp_buckets,
    step_time,
)
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import LocalParameter, Memory, UnitBytes

BANDWIDTH_INSIDE = 100.0  # bytes per second
LATENCY_INSIDE = 0.25  # seconds
BANDWIDTH_BETWEEN = 10.0
LATENCY_BETWEEN = 2.0
INSIDE = Link(BANDWIDTH_INSIDE, LATENCY_INSIDE)
BETWEEN = Link(BANDWIDTH_BETWEEN, LATENCY_BETWEEN)


# --- collectives of 1000 bytes


def test_a_ring_in_a_machine_sends_all_parts_but_one_once_or_twice() -> None:
    cluster = Cluster(per_machine=8, inside=INSIDE, between=BETWEEN, nccl=False)

    once_around = 3 / 4 * 1000 / BANDWIDTH_INSIDE + 3 * LATENCY_INSIDE
    assert cluster.all_gather(1000, 4) == pytest.approx(once_around)
    assert cluster.all_reduce(1000, 4) == pytest.approx(2 * once_around)
    assert cluster.all_gather(1000, 1) == cluster.all_reduce(1000, 1) == 0


def test_a_ring_over_machines_is_as_fast_as_its_slowest_link() -> None:
    cluster = Cluster(per_machine=2, inside=INSIDE, between=BETWEEN, nccl=False)

    # Two machines of two processes: one hop between machines, and two inside them.
    latency = LATENCY_BETWEEN + 2 * LATENCY_INSIDE
    expected = 2 * 3 / 4 * 1000 / BANDWIDTH_BETWEEN + 2 * latency
    assert cluster.all_reduce(1000, 4) == pytest.approx(expected)

    # One process of each machine.
    expected = 2 * 1 / 2 * 1000 / BANDWIDTH_BETWEEN + 2 * LATENCY_BETWEEN
    assert cluster.all_reduce(1000, 2, stride=2) == pytest.approx(expected)


def test_nccl_has_a_ring_for_each_card_of_a_machine() -> None:
    cluster = Cluster(per_machine=4, inside=INSIDE, between=BETWEEN, nccl=True)

    bandwidth = 4 * BANDWIDTH_BETWEEN
    latency = 1 * LATENCY_BETWEEN + 6 * LATENCY_INSIDE
    assert cluster.all_gather(1000, 8) == pytest.approx(7 / 8 * 1000 / bandwidth + latency)


def test_nccl_has_a_tree_over_many_machines() -> None:
    processes = 4096
    with_nccl = Cluster(per_machine=4, inside=INSIDE, between=BETWEEN, nccl=True)
    with_gloo = with_nccl._replace(nccl=False)

    height = math.log2(processes / 4)
    latency = height * LATENCY_BETWEEN + 4 * LATENCY_INSIDE
    tree = 2 * 1000 / (4 * BANDWIDTH_BETWEEN) + 2 * latency
    assert with_nccl.all_reduce(1000, processes) == pytest.approx(tree)
    assert tree < with_gloo.all_reduce(1000, processes)


# --- steps

MIB_OF_FLOATS = 2**18


def memory_of(sizes: list[int], bucket_mib: float | None = None) -> Memory:
    """Stand for the memory of a model.

    Args:
        sizes: the number of float32 values of each parameter, which is a unit of FSDP2.
        bucket_mib: the size of DDP's buckets; ``None`` for DDP's own.
    """
    parallel = ParallelConfig(ddp_bucket_cap_mb=bucket_mib)

    parameters = []
    units = []
    for index, size in enumerate(sizes):
        parameter = LocalParameter(
            name=str(index), rows=size, row_numel=1, element_bytes=4, is_trained=True
        )
        parameters.append(parameter)
        units.insert(0, UnitBytes([parameter], is_bf16=False, stays_gathered=False))
    return SimpleNamespace(  # type: ignore[return-value]
        recipe=SimpleNamespace(settings=SimpleNamespace(parallel=parallel)),
        parameters=parameters,
        units=units,
        frozen=[],
        bf16=False,
        reduces_once=True,
    )


@pytest.mark.parametrize(
    ("bucket_mib", "limits"),
    [
        pytest.param(
            None,
            [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20],
            id="default, with a small first bucket",
        ),
        pytest.param(25.0, [25 * 2**20], id="default, set by the user"),
        pytest.param(0.5, [2**19], id="smaller than a gradient"),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_as_in_torch(
    bucket_mib: float | None, limits: list[int]
) -> None:
    sizes = [30 * MIB_OF_FLOATS, 10 * MIB_OF_FLOATS, 10 * MIB_OF_FLOATS, 3 * MIB_OF_FLOATS]
    gradients = [torch.empty(size, device="meta") for size in reversed(sizes)]
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(
        gradients, limits, [False] * len(gradients)
    )
    expected = []
    for bucket in buckets:
        expected.append(sum(gradients[index].nbytes for index in bucket))

    assert ddp_buckets(memory_of(sizes, bucket_mib)) == expected


FORWARD = 0.1  # seconds of a row
BACKWARD = 0.2
OPTIMIZER = 0.05
COMPUTE = Compute(forward=FORWARD, backward=BACKWARD, optimizer=OPTIMIZER)
ROWS = 2
# Links that send a MiB per second, without latency.
CLUSTER = Cluster(per_machine=8, inside=Link(2**20, 0.0), between=BETWEEN, nccl=False)


def step_under(
    sharding: Sharding, memory: Memory, accumulation: int, compute: Compute = COMPUTE
) -> Step:
    return step_time(memory, compute, CLUSTER, sharding, rows=ROWS, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_under_ddp_sends_gradients_once(accumulation: int) -> None:
    """The single bucket of a MiB is full at the end of the backward pass, which hides nothing."""
    memory = memory_of([MIB_OF_FLOATS])

    step = step_under(Sharding(replicas=4, shards=1), memory, accumulation)

    mib_sent = 2 * 3 / 4
    assert step.communication == pytest.approx(mib_sent)
    assert step.exposed == pytest.approx(mib_sent)
    seconds_of_rows = accumulation * ROWS * (FORWARD + BACKWARD)
    assert step.compute == pytest.approx(seconds_of_rows + OPTIMIZER)


def test_the_backward_pass_hides_all_buckets_of_ddp_but_the_last() -> None:
    """Each of three buckets is sent in 1.5 s."""
    memory = memory_of([MIB_OF_FLOATS] * 3, bucket_mib=1.0)
    slow = COMPUTE._replace(backward=3.0)  # 6 s for two rows

    step = step_under(Sharding(replicas=4, shards=1), memory, accumulation=1, compute=slow)

    assert step.communication == pytest.approx(3 * 1.5)
    assert step.exposed == pytest.approx(1.5)

    step = step_under(Sharding(replicas=4, shards=1), memory, accumulation=1)
    assert step.exposed == pytest.approx(3 * 1.5 - ROWS * BACKWARD)


TWO_SHARDS = Sharding(replicas=1, shards=2)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_under_fsdp2_gathers_twice_a_micro_batch_and_reduces_once(
    accumulation: int,
) -> None:
    memory = memory_of([MIB_OF_FLOATS, MIB_OF_FLOATS])

    step = step_under(TWO_SHARDS, memory, accumulation)

    mib_per_collective = 2 * 1 / 2  # two units, half of each
    mib_sent = (accumulation * 2 + 1) * mib_per_collective
    assert step.communication == pytest.approx(mib_sent)


def test_fsdp2_may_reduce_after_each_micro_batch() -> None:
    memory = memory_of([MIB_OF_FLOATS, MIB_OF_FLOATS])
    memory.reduces_once = False  # type: ignore[misc]

    step = step_under(TWO_SHARDS, memory, accumulation=4)

    assert step.communication == pytest.approx(4 * (2 + 1))


def test_fsdp2_hides_what_it_sends_while_it_computes() -> None:
    memory = memory_of([MIB_OF_FLOATS, MIB_OF_FLOATS])
    gathering = 2 * 0.5  # seconds for both units; to reduce them takes as long

    step = step_under(TWO_SHARDS, memory, accumulation=4)

    exposed_in_forward = gathering - ROWS * FORWARD
    exposed_in_backward = gathering - ROWS * BACKWARD
    exposed_in_last_backward = 2 * gathering - ROWS * BACKWARD
    assert step.exposed == pytest.approx(
        4 * exposed_in_forward + 3 * exposed_in_backward + exposed_in_last_backward
    )


def test_nothing_hides_the_first_gather_and_the_last_reduction_of_fsdp2() -> None:
    memory = memory_of([MIB_OF_FLOATS, MIB_OF_FLOATS])
    slow = COMPUTE._replace(forward=10.0, backward=20.0)

    step = step_under(TWO_SHARDS, memory, accumulation=1, compute=slow)

    assert step.exposed == pytest.approx(0.5 + 0.5)


def test_a_step_under_hsdp_also_adds_up_the_gradients_of_the_replicas() -> None:
    memory = memory_of([MIB_OF_FLOATS, MIB_OF_FLOATS])

    step = step_under(Sharding(replicas=2, shards=2), memory, accumulation=1)

    # Each of two shards has half of a unit's MiB, and sends it once to the other shard. To the
    # other replica it sends 2 (2 - 1) / 2 of its half.
    gathers = 2 * 2 * 0.5  # of two units, in the forward and in the backward pass
    reductions_of_shards = 2 * 0.5
    reductions_of_replicas = 2 * 0.5
    assert step.communication == pytest.approx(
        gathers + reductions_of_shards + reductions_of_replicas
    )


def test_a_frozen_model_computes_and_is_gathered_once_a_micro_batch() -> None:
    memory = memory_of([MIB_OF_FLOATS])
    without = step_under(TWO_SHARDS, memory, accumulation=4)
    memory.frozen.append(memory_of([3 * MIB_OF_FLOATS]))

    step = step_under(TWO_SHARDS, memory, accumulation=4, compute=COMPUTE._replace(frozen=0.3))

    gather = 1 / 2 * 3
    assert step.compute - without.compute == pytest.approx(4 * ROWS * 0.3)
    assert step.communication - without.communication == pytest.approx(4 * gather)
    assert step.exposed - without.exposed == pytest.approx(4 * (gather - ROWS * 0.3))
