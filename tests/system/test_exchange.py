"""How ranks exchange gradients: watching changes no bit, and 16 bits round and send half the bytes."""

from pathlib import Path

from llmtrain.record.checkpoint import tensors_digest
from tests.forked import run_forked
from tests.launching import GPT, TINY, Ended, read_json, torchrun


def test_how_three_ranks_exchange_gradients(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    run_forked([*torchrun(3), "tests/system/exchange_ranks.py", str(path)]).assert_ok()
    comparison = read_json(path)

    assert comparison["has_same_bits_if_watched"]
    for comm_hook, smallest, largest in [("bf16", 1e-5, 1e-2), ("fp16", 1e-6, 2e-3)]:
        assert smallest < comparison[comm_hook]["relative_error"] < largest
        assert comparison[comm_hook]["share_of_bytes"] == 0.5

    # On two processes, a + b = b + a would hide the difference.
    assert comparison["has_same_bits_if_restarted"]
    assert not comparison["has_same_bits_without_rebuilding"]

    # Once a step, in its last micro-batch.
    counts = comparison["reductions"]
    assert [count > 0 for count in counts] == [False, False, True] * 3
    assert all(comparison["reductions_without_no_sync"]), "the counts would show a missing no_sync"


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
