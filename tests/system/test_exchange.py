"""How ranks exchange gradients: watching changes no bit, and 16 bits round and send half the bytes."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.record.checkpoint import tensors_digest
from tests.forked import run_forked
from tests.launching import GPT, TINY, Ended, read_json, torchrun


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the comparison that exchange_ranks.py writes."""
    path = tmp_path_factory.mktemp("exchange") / "comparison.json"
    run_forked([*torchrun(3), "tests/system/exchange_ranks.py", str(path)]).assert_ok()
    return read_json(path)


def test_a_run_whose_exchange_is_watched_has_the_same_bits(comparison: Any) -> None:
    assert comparison["has_same_bits_if_watched"]


@pytest.mark.parametrize(
    ("comm_hook", "smallest", "largest"),
    [pytest.param("bf16", 1e-5, 1e-2, id="bf16"), pytest.param("fp16", 1e-6, 2e-3, id="fp16")],
)
def test_sixteen_bits_round_and_no_more(
    comm_hook: str, smallest: float, largest: float, comparison: Any
) -> None:
    assert smallest < comparison[comm_hook]["relative_error"] < largest


@pytest.mark.parametrize("comm_hook", ["bf16", "fp16"])
def test_sixteen_bits_are_half_the_bytes(comm_hook: str, comparison: Any) -> None:
    assert comparison[comm_hook]["share_of_bytes"] == 0.5


def test_a_compressed_run_resumes_in_the_bits_of_one_that_was_not_interrupted(
    text_file: Path, tmp_path: Path
) -> None:
    def train(flags: str) -> Ended:
        words = (
            f"--ddp_comm_hook bf16 --max_steps 9 --save_steps 4 --eval_fraction 0 "
            f"--dataset {text_file} {flags}"
        )
        return run_forked([*torchrun(2), GPT, *TINY, *words.split()]).assert_ok()

    uninterrupted = tmp_path / "uninterrupted"
    first = train(f"--output_dir {uninterrupted}")
    assert "exchange  approximate: gradients are added up in bfloat16" in first.out

    resumed = tmp_path / "resumed"
    checkpoint = uninterrupted / "checkpoints" / "step-00000008"
    second = train(f"--resume_from_checkpoint {checkpoint} --output_dir {resumed}")
    assert "changed" not in second.out

    last_checkpoint = Path("checkpoints") / "step-00000009"
    assert tensors_digest(resumed / last_checkpoint) == tensors_digest(
        uninterrupted / last_checkpoint
    )
