"""Processes x micro-batches x rows: how a global batch is computed, never what it holds."""

import re

import pytest

from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError
from llmtrain.training.layout import Layout


def data(rows: int, micro: int) -> DataConfig:
    """Return the flags of a user who set the size of a micro-batch."""
    config = DataConfig(global_batch_size=rows, per_device_train_batch_size=micro)
    config.origins = {"per_device_train_batch_size": "command line"}
    return config


@pytest.mark.parametrize(
    ("rows", "processes", "micro"), [(24, 1, 12), (6, 1, 6), (7, 1, 7), (34, 2, 1), (60, 3, 10)]
)
def test_a_default_micro_batch_divides_the_rows_of_a_rank(
    rows: int, processes: int, micro: int
) -> None:
    config = DataConfig(global_batch_size=rows)
    assert config.per_device_train_batch_size == 16
    assert Layout.of(config, processes).micro_batch == micro


def refusal(rows: int, micro: int, processes: int) -> str:
    with pytest.raises(UserError) as caught:
        Layout.of(data(rows, micro), processes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "micro", "processes", "banner"),
    [
        (64, 8, 2, "64 rows per step = 2 processes x 4 micro-batches x 8 rows"),
        (64, 8, 1, "64 rows per step = 1 process x 8 micro-batches x 8 rows"),
        (16, 8, 2, "16 rows per step = 2 processes x 1 micro-batch x 8 rows"),
        (1, 1, 1, "1 row per step = 1 process x 1 micro-batch x 1 row"),
    ],
)
def test_the_banner_shows_how_the_batch_is_computed(rows, micro, processes, banner):
    assert str(Layout.of(data(rows, micro), processes)) == banner


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_every_layout_that_is_accepted_computes_the_whole_batch(processes, micro):
    share = 24 // processes
    if share % min(micro, share):
        refusal(24, micro, processes)
    else:
        layout = Layout.of(data(24, micro), processes)
        assert (
            layout.processes * layout.accumulation * layout.micro_batch
            == layout.global_batch_size
            == 24
        )
        assert layout.micro_batch == min(micro, share)


@pytest.mark.parametrize(
    ("rows", "processes"), [(64, 3), (7, 2), (2, 4), (1, 8), (100, 7), (17, 16)]
)
def test_rows_that_do_not_divide_among_processes_are_answered_with_values_that_do(rows, processes):
    message = refusal(rows, 1, processes)
    named = re.search(r"use ([\d or]+), or --num_processes (\d+)\.", message)
    assert named
    assert f"--global_batch_size {rows}" in message
    for other in map(int, named[1].split(" or ")):
        assert Layout.of(data(other, 1), processes).global_batch_size == other
    assert Layout.of(data(rows, 1), int(named[2])).processes <= processes


@pytest.mark.parametrize(
    ("rows", "micro", "processes"), [(64, 7, 2), (10, 4, 1), (13, 6, 1), (36, 5, 3), (62, 30, 2)]
)
def test_a_micro_batch_that_does_not_divide_the_share_is_answered_with_values_that_do(
    rows, micro, processes
):
    message = refusal(rows, micro, processes)
    named = re.search(r"use ([\d, or]+)\.", message)
    assert named
    assert f"--per_device_train_batch_size {micro}" in message
    for other in map(int, re.findall(r"\d+", named[1])):
        assert Layout.of(data(rows, other), processes).micro_batch == other


@pytest.mark.parametrize(("rows", "micro", "processes"), [(8, 64, 2), (8, 5, 2), (3, 2**40, 3)])
def test_a_micro_batch_larger_than_the_share_is_the_share(rows, micro, processes):
    layout = Layout.of(data(rows, micro), processes)
    assert (layout.accumulation, layout.micro_batch) == (1, rows // processes)
