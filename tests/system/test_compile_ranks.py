"""Processes that share a model compile its blocks, and end together if one of them cannot."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import TINY, accelerate, long_form, run


@long_form
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compiled_blocks_of_a_sharded_model_have_the_same_gradients(precision: str) -> None:
    """With bf16, the norms of a block are an FSDP unit inside the block."""
    launcher = accelerate("fsdp2", "--mixed_precision", precision)
    run_forked([*launcher, "tests/system/compile_ranks.py"], timeout=60).assert_ok()


@long_form
@pytest.mark.parametrize("config", ["fsdp2", "cpu_ddp"])
def test_both_ranks_end_if_the_compiler_of_one_fails(
    config: str, text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    launcher = accelerate(config)
    flags = f"--torch_compile always --dataset {text_file} --output_dir {tmp_path}/run".split()
    command = [*launcher, "tests/system/faulty_gpt.py", *TINY, *flags]
    failure_file = tmp_path / "failure"

    ended = run(command, {"FAULT": "broken compiler", "FAILURE_FILE": str(failure_file)})
    seconds = time.time() - float(failure_file.read_text())

    assert ended.status != 0
    errors = re.findall(r"^error: (.*)", ended.err, re.MULTILINE)
    assert len(errors) == 1, ended.err
    assert re.fullmatch(
        r"rank 1: torch.compile does not work here: "
        r".*no C\+\+ compiler here; use --torch_compile never.",
        errors[0],
    )
    score(
        f"a compiler failed on rank 1 of 2 ({config}): both ranks had ended after {seconds:.0f} s"
    )
