"""On two processes, optimizers of other packages continue after a restart bit for bit."""

from pathlib import Path

import pytest
import torch

from llmtrain import GPT, GPTConfig
from llmtrain.record.checkpoint import STRUCTURE, read_file
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.optimizer_state import OptimizerState
from tests.forked import run_forked
from tests.launching import accelerate, long_form
from tests.odd_optimizer import Odd

pytest.importorskip("heavyball")
pytest.importorskip("pytorch_optimizer")


@long_form
@pytest.mark.parametrize("config", ["cpu_ddp", "fsdp2"])
def test_states_are_restored_on_all_ranks(config: str, tmp_path: Path) -> None:
    launcher = accelerate(config)
    command = [*launcher, "tests/system/state_ranks.py", str(tmp_path)]
    # heavyball compiles every function, which takes half a minute.
    run_forked(command, {"TORCHDYNAMO_DISABLE": "1"}).assert_ok()

    # A run on one process restores the states of two.
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=12, block_size=8), 31)
    optimizer = Odd(model.parameters())
    saved = tmp_path / "odd" / "step-00000003" / "optimizer"
    OptimizerState(model, optimizer).restore(read_file(saved / STRUCTURE), read_tensors(saved))

    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["moment"].shape == parameter.shape
        assert state["codes"].dtype == torch.uint8
        for value in state[0]["list"]:
            assert type(value) in (torch.Tensor, type(None)), "no sharded tensor"
