"""What the ranks send of their gradients: exactly as DDP does, also when watched, or compressed to 16 bits."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.record.checkpoint import tensors_digest
from tests.forked import run_forked
from tests.launching import GPT, TINY, read_json, torchrun


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


def test_sixteen_bits_are_half_the_bytes(found: Any) -> None:
    assert found["bf16 bytes"] == found["fp16 bytes"] == 0.5


def test_a_compressed_run_resumes_in_the_bits_of_one_that_was_not_interrupted(
    text_file: Path, tmp_path: Path
) -> None:
    flags = [
        *TINY,
        *("--ddp_comm_hook", "bf16"),
        *("--max_steps", "9"),
        *("--save_steps", "4"),
        *("--eval_fraction", "0"),
        *("--dataset", str(text_file)),
    ]
    straight = tmp_path / "straight"
    resumed = tmp_path / "resumed"
    first = run_forked([*torchrun(2), GPT, *flags, "--output_dir", str(straight)]).assert_ok()
    assert "exchange  approximate: gradients are added up in bfloat16" in first.out
    middle = straight / "checkpoints" / "step-00000008"
    more = ["--resume_from_checkpoint", str(middle), "--output_dir", str(resumed)]
    second = run_forked([*torchrun(2), GPT, *flags, *more]).assert_ok()
    assert "changed" not in second.out
    digests = [
        tensors_digest(folder / "checkpoints" / "step-00000009") for folder in (straight, resumed)
    ]
    assert digests[0] == digests[1]
