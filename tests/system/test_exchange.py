"""Sending less than whole gradients: what is lost, what is only late, and what a checkpoint must hold."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.record.checkpoint import digest_of
from tests.forked import run_forked
from tests.launching import GPT, LONG, TINY, long_form, read_json, torchrun


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("exchange") / "found.json"
    run_forked([*torchrun(3), "tests/system/exchange_ranks.py", str(path)]).assert_ok()
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


def test_a_gradient_that_is_not_finite_is_not_owed(found: Any) -> None:
    assert found["poisoned"] == {"seen": True, "kept": True, "over": True}


@pytest.mark.parametrize(
    "how",
    [
        ["--ddp_comm_hook", "powersgd"],
        pytest.param(["--ddp_bucket_cap_mb", "0.01", "0.02"], marks=long_form),
    ],
)
def test_a_run_goes_on_in_the_bits_of_one_that_was_not_interrupted(
    how: list[str], text_file: Path, tmp_path: Path
) -> None:
    flags = [
        *TINY,
        *how,
        "--max_steps",
        "9",
        "--save_steps",
        "4",
        "--eval_fraction",
        "0",
        "--dataset",
        str(text_file),
    ]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    first = run_forked([*torchrun(2), GPT, *flags, "--output_dir", str(straight)]).assert_ok()
    assert ("approximate" in first.out) == ("--ddp_bucket_cap_mb" not in how)
    middle = straight / "checkpoints" / "step-00000008"
    more = ["--resume_from_checkpoint", str(middle), "--output_dir", str(resumed)]
    second = run_forked([*torchrun(2), GPT, *flags, *more]).assert_ok()
    assert "changed" not in second.out
    one, other = (
        digest_of(folder / "checkpoints" / "step-00000009") for folder in (straight, resumed)
    )
    assert one == other
    if "powersgd" in how and LONG:
        exact = [word for word in flags if word not in how]
        third = run_forked([*torchrun(2), GPT, *exact, *more]).assert_ok()
        assert "changed   how gradients are exchanged: {'ddp_comm_hook': 'powersgd'" in third.out
