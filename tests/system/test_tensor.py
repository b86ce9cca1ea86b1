"""A model whose matrices are cut over processes computes what the whole one does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import long_form, read_json, torchrun

SCRIPT = "tests/system/tensor_ranks.py"


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=long_form)])
def test_logits_and_gradients_are_those_of_the_whole_model(
    processes: int, tmp_path: Path, score: Callable[[str], None]
) -> None:
    run_forked([*torchrun(processes), SCRIPT, str(tmp_path / "found.json")]).assert_ok()
    found = read_json(tmp_path / "found.json")
    said = found.pop("refused")
    for kind, readings in found.items():
        score(
            f"tensor parallelism over {processes}: {kind}: logits {readings['logits']:.1e}, "
            f"gradients {readings['gradients']:.1e}"
        )
        assert readings["logits"] < 1e-12, kind
        limit = 1e-6 if kind == "gemma3_text" else 1e-12  # which computes some of it in float32
        assert readings["gradients"] < limit, (kind, readings["worst"])
        assert readings["names"], kind
        assert readings["held"] < 1.05 / processes, kind
    assert "GPT2LMHeadModel has no plan for tensor parallelism" in said["gpt2"]
    assert "is not supported; use FSDP" in said["mixtral"]
    assert (
        f"1 heads (num_key_value_heads), which cannot be divided among {processes} processes"
        in said["llama"]
    )


@long_form
def test_a_gradient_that_is_not_added_up_would_be_seen(tmp_path: Path) -> None:
    run_forked([*torchrun(2), SCRIPT, str(tmp_path / "found.json"), "without_the_sum"]).assert_ok()
    found = read_json(tmp_path / "found.json")
    assert found["llama"]["logits"] < 1e-12
    assert found["llama"]["gradients"] > 1e-2
