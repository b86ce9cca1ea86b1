"""Seconds of collectives, and what of them hides behind work, against sums that one can make by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from llmtrain.lab.plan.speed import (
    Cluster,
    Compute,
    Link,
    _exposed_prefetches,
    _exposed_sends,
    bytes_sent,
    ddp_buckets,
    step_time,
)
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.sharding import Sharding
from llmtrain.training.parameter_bytes import LocalParameter, Unit
from llmtrain.training.predicted_memory import Memory

FAST, SLOW = Link(100.0, 0.25), Link(10.0, 2.0)


def test_a_ring_sends_twice_all_but_one_part_and_waits_once_around() -> None:
    inside = Cluster(8, FAST, SLOW, nccl=False)
    assert inside.all_reduce(1000, 4) == pytest.approx(2 * 3 / 4 * 1000 / 100 + 2 * 3 * 0.25)
    assert inside.all_gather(1000, 4) == pytest.approx(3 / 4 * 1000 / 100 + 3 * 0.25)
    assert inside.all_reduce(1000, 1) == inside.all_gather(1000, 1) == 0


def test_a_ring_over_machines_is_as_fast_as_its_slowest_link() -> None:
    across = Cluster(2, FAST, SLOW, nccl=False)
    once_around = 1 * 2.0 + 2 * 0.25  # two machines of two: one hop between, two inside
    rate = 10 * 1448 / 1514  # less the headers of TCP
    assert across.all_reduce(1000, 4) == pytest.approx(1.5 * 1000 / rate + 2 * once_around)
    assert across.all_reduce(1000, 2, stride=2) == pytest.approx(1000 / rate + 2 * 2.0)


def test_nccl_has_a_ring_for_each_card_and_a_tree_over_many_machines() -> None:
    few, many = Cluster(4, FAST, SLOW, nccl=True), 4096
    assert few.all_gather(1000, 8) == pytest.approx(7 / 8 * 1000 / 40 + 1 * 2.0 + 6 * 0.25)
    tree = 2 * 1000 / 40 + 2 * (math.log2(many / 4) * 2.0 + 4 * 0.25)
    assert few.all_reduce(1000, many) == pytest.approx(tree)
    assert tree < Cluster(4, FAST, SLOW, nccl=False).all_reduce(1000, many)


def test_what_is_sent_hides_behind_the_work_that_is_left() -> None:
    assert _exposed_sends([1, 1, 1], [0.5, 0.5, 0.5]) == 0.5  # the last has nothing to hide behind
    assert _exposed_sends([1, 1, 1], [2, 2, 2]) == 4.0  # from 1 to 7, and the work ends at 3
    assert _exposed_prefetches([1, 1, 1], [0.5, 0.5, 0.5]) == 0.5  # the first is waited for
    assert _exposed_prefetches([1, 1, 1], [2, 2, 2]) == pytest.approx(
        4.0
    )  # all of them, and the last one's work: 7 to 3


def memory_of(*sizes: int, bucket: float = 25.0) -> Memory:
    parameters = [
        LocalParameter(name=f"{number}", rows=size, row_numel=1, element_bytes=4, is_trained=True)
        for number, size in enumerate(sizes)
    ]
    settings = SimpleNamespace(parallel=ParallelConfig(ddp_bucket_cap_mb=bucket))
    recipe = SimpleNamespace(settings=settings)
    units = [
        Unit(frozenset([parameter.name]), is_bf16=False, stays_gathered=False)
        for parameter in reversed(parameters)
    ]
    found = SimpleNamespace(
        recipe=recipe,
        parameters=parameters,
        units=units,
        bf16=False,
        reduces_once=True,
    )
    return found  # type: ignore[return-value]


def test_buckets_are_filled_from_the_last_parameter_as_torch_fills_them() -> None:
    """The first bucket is smaller only if the user leaves the size of buckets to torch."""
    mib = 2**18  # numbers of four bytes
    sizes = [30 * mib, 10 * mib, 10 * mib, 3 * mib]
    gradients = [torch.empty(size, device="meta") for size in reversed(sizes)]
    first_bytes = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    for bucket, is_set, limits in (
        (25.0, False, [first_bytes, 25 * 2**20]),
        (25.0, True, [25 * 2**20]),
        (8.0, False, [8 * 2**20]),
        (0.5, True, [2**19]),
    ):
        memory = memory_of(*sizes, bucket=bucket)
        if is_set:
            memory.recipe.settings.parallel.origins = {"ddp_bucket_cap_mb": "command line"}
        assignment, _ = torch.distributed._compute_bucket_assignment_by_size(
            gradients, limits, [False] * len(gradients)
        )
        expected = [sum(gradients[i].nbytes for i in indices) for indices in assignment]
        assert ddp_buckets(memory) == expected


def test_an_update_under_ddp_sends_once_however_many_micro_batches_it_has() -> None:
    memory = memory_of(2**18)
    cluster, compute = Cluster(8, Link(2**20, 0.0), SLOW, nccl=False), Compute(0.1, 0.2, 0.05)
    one, four = (step_time(memory, compute, cluster, Sharding(4, 1), 2, count) for count in (1, 4))
    assert one.communication == four.communication == pytest.approx(1.5)
    assert one.compute == pytest.approx(2 * 0.3 + 0.05)
    assert four.compute == pytest.approx(4 * 2 * 0.3 + 0.05)
    handled = step_time(memory, compute._replace(per_sent_byte=1e-6), cluster, Sharding(4, 1), 2, 1)
    assert handled.compute - one.compute == pytest.approx(1e-6 * 2 * 3 / 4 * 2**20)
    assert (
        one.exposed == four.exposed == pytest.approx(1.5)
    )  # a single bucket is full when the backward pass ends


MIB_A_SECOND = Cluster(8, Link(2**20, 0.0), SLOW, nccl=False)
COMPUTE = Compute(0.1, 0.2, 0.05)


def test_fsdp_gathers_twice_a_micro_batch_and_reduces_once_an_update() -> None:
    memory, both = memory_of(2**18, 2**18), Sharding(1, 2)  # half of a MiB is sent for each unit
    one, four = (step_time(memory, COMPUTE, MIB_A_SECOND, both, 2, count) for count in (1, 4))
    assert one.communication == pytest.approx(2 * 1 + 1)
    assert four.communication == pytest.approx(4 * 2 * 1 + 1)
    assert bytes_sent(memory, both, 4) == pytest.approx(2**20 * 9)
    forward, backward = 0.1, 0.2  # of a unit: two rows, two units
    late = (
        1.0 - forward
    )  # both are fetched at once, one after the other: the first has 0.1 of the other's 0.5 hidden
    last = max(1.0 - backward, 2.0 - backward)  # reduced as well, each 0.5, in the last micro-batch
    assert four.exposed == pytest.approx(4 * late + 3 * (1.0 - backward) + last)
    memory.reduces_once = False  # type: ignore[misc]
    assert step_time(memory, COMPUTE, MIB_A_SECOND, both, 2, 4).communication == pytest.approx(
        4 * 3
    )
