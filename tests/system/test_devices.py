"""What a run needs of its device: on a GPU the losses of a CPU, and little memory for checksums."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.observe.replicas import weight_checksums
from tests.launching import FINETUNE, GPT, PYTHON, SMALL_LLAMA, TINY, accelerate, run, series


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("launcher", "recipe", "flags"),
    [
        (PYTHON, GPT, TINY),
        (PYTHON, FINETUNE, ["--from_config", "llama", *SMALL_LLAMA]),
        (accelerate("fsdp2", "--num_processes", "1"), GPT, TINY),
    ],
    ids=["gpt", "packed", "sharded"],
)
def test_a_run_on_a_gpu_has_the_losses_of_a_cpu(
    launcher: list[str], recipe: str, flags: list[str], text_file: Path, tmp_path: Path
) -> None:
    flags = [*flags, *shlex.split(f"--dataset {text_file} --output_dir")]
    on_cpu = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    run([*PYTHON, recipe, *flags, str(tmp_path / "cpu")], on_cpu).assert_ok()
    run([*launcher, recipe, *flags, str(tmp_path / "gpu")]).assert_ok()

    for key in ("train/loss", "eval/loss"):
        losses = series(tmp_path / "gpu", key)
        assert losses == pytest.approx(series(tmp_path / "cpu", key), rel=2e-2)


class LargestInteger(TorchDispatchMode):
    """Notes the bytes of the largest tensor of 64-bit integers that is made."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_checksums_of_weights_need_less_memory_than_the_weights() -> None:
    large = nn.Linear(1 << 12, 1 << 12, bias=False)
    with LargestInteger() as largest:
        weight_checksums(large)
    assert 0 < largest.bytes <= large.weight.nbytes
