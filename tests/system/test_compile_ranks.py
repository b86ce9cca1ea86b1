"""Processes that share a model compile its blocks, and end together if one of them cannot."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import TINY, accelerate, long_form, read_json, run


@pytest.mark.parametrize("precision", [pytest.param("no", marks=long_form), "bf16"])
def test_compiled_blocks_of_a_sharded_model_compute_what_they_computed(
    precision: str, tmp_path: Path
) -> None:
    """In bf16, blocks hold units of their own."""
    launcher = accelerate("fsdp2", "--mixed_precision", precision)
    run_forked([*launcher, "tests/system/compile_ranks.py", str(tmp_path)], timeout=60).assert_ok()
    for rank in (0, 1):
        found = read_json(tmp_path / f"{rank}.json")
        assert found.pop("gradients apart") < 1e-5
        assert found == {
            "compiled blocks": 2,
            "random numbers as before": True,
            "gradients left": 0,
            "all sharded": True,
        }


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("cpu_ddp", marks=long_form)])
def test_both_ranks_end_if_the_compiler_of_one_fails(
    config: str, text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    flags = [*TINY, "--torch_compile", "always", "--dataset", str(text_file)]
    launcher = accelerate(config, "--mixed_precision", "no")
    command = [*launcher, "tests/system/broken_compiler.py", *flags]
    ended = run(
        [*command, "--output_dir", str(tmp_path / "run")],
        env={"FAILURE_FILE": str(tmp_path / "failure")},
    )
    seconds = time.time() - float((tmp_path / "failure").read_text())

    assert ended.status != 0
    errors = re.findall(r"^error: (.*)", ended.err, re.MULTILINE)
    assert len(errors) == 1, ended.err
    assert re.fullmatch(
        r"rank 1: torch.compile does not work here: .*no C\+\+ compiler here; use --torch_compile never.",
        errors[0],
    )
    score(
        f"a compiler failed on rank 1 of 2 ({config}): both ranks had ended after {seconds:.0f} s"
    )
