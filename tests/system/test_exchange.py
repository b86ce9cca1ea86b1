"""Sending less than whole gradients: what is lost, what is only late, and what a checkpoint must hold."""

from typing import Any

import pytest

from tests.launching import read_json, run, torchrun


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("exchange") / "found.json"
    run([*torchrun(3), "tests/system/exchange_ranks.py", str(path)]).assert_ok()
    return read_json(path)


def test_a_run_that_is_watched_has_the_same_bits(found: Any) -> None:
    assert found["watched"]


def test_sixteen_bits_round_and_no_more(found: Any) -> None:
    assert 1e-5 < found["bf16"] < 1e-2
    assert 1e-6 < found["fp16"] < 2e-3


def test_what_powersgd_leaves_out_is_sent_later(found: Any) -> None:
    found = found["powersgd"]
    assert found["buckets"] > 1
    assert 0.1 < found["left out of one gradient"] < 1
    assert found["lost in the end"] < 1e-5
    assert found["others are exact"]
    assert found["same everywhere"]
    assert found["bytes"] < 0.5


def test_a_resumed_run_owes_what_it_owed(found: Any) -> None:
    assert found["resumed"] == {"none": True, "bf16": True, "powersgd": True}
    assert not found["forgotten"], "the test would not see a checkpoint that lacks it"


def test_processes_alone_meet_in_the_mean_of_their_weights(found: Any) -> None:
    assert found["alone"] == {
        "alone": True,
        "together": True,
        "the mean": True,
        "no one goes on alone past a NaN": True,
    }
