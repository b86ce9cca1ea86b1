"""Optimizers of other packages go on after a restart as if there had been none, on two processes."""

from pathlib import Path

import pytest
import torch

from llmtrain import GPT, GPTConfig
from llmtrain.record.checkpoint import read_structure
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.optimizer_state import OptimizerState
from tests.forked import run_forked
from tests.launching import accelerate, read_json
from tests.odd_optimizer import Odd

pytest.importorskip("heavyball")
pytest.importorskip("pytorch_optimizer")

SCRIPT = "tests/system/state_ranks.py"
LAYOUTS = {
    "DDP": accelerate("cpu_ddp"),
    "FSDP2": accelerate("fsdp2", "--mixed_precision", "no"),
}
EVERYWHERE = ["odd", "odd in bf16", "compact", "adamw", "muon", "schedule-free"]
# heavyball finds the state of a tensor by its address, which is 0 for every DTensor.
ONLY_REPLICATED = ["heavyball soap", "heavyball adamw", "pytorch_optimizer soap"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    names = [*EVERYWHERE, *ONLY_REPLICATED]
    # heavyball compiles every function, for half a minute.
    environment = {"TORCHDYNAMO_DISABLE": "1"}
    run_forked([*LAYOUTS[layout], SCRIPT, str(tmp_path), *names], environment).assert_ok()

    for rank in (0, 1):
        found = read_json(tmp_path / f"found-{rank}.json")
        errors = found.pop("ranks that differ")
        differ = "keeps other values on rank 1 than on rank 0 in"
        number = errors.pop("a number")
        assert number.startswith(f"Average {differ} its numbers, strings or lists; a checkpoint ")
        assert errors.pop("a tensor").startswith(f"Average {differ} mean.rows; a checkpoint holds ")
        noise = "transformer.wte.weight.noise"
        assert errors.pop("the optimizer").startswith(f"the optimizer AdamW {differ} {noise}; ")
        expected = f"the optimizer AdamW {differ} transformer.wte.weight.step; "
        if layout == "FSDP2":
            expected = "the states of rank 1 have other tensors than those of rank 0"
        assert errors.pop("one rank").startswith(expected)
        assert not errors
        assert found.pop("sharded and full") == []
        if layout == "FSDP2":
            for name in ONLY_REPLICATED:
                outcome = found.pop(name)
                refusals = ("the optimizer SOAP fails on", "the optimizer AdamW fails on")
                works = outcome == [] and name.startswith("heavyball")  # since version 3.2.1
                assert works or outcome.startswith(refusals), name
        assert found == {name: [] for name in found}

    # A state that was sharded comes back in a run that is not.
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=12, block_size=8), 31)
    optimizer = Odd(model.parameters())
    folder = tmp_path / "odd" / "step-00000003" / "optimizer"
    OptimizerState(model, optimizer).restore(read_structure(folder), read_tensors(folder))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["moment"].shape == state["plain"].shape == parameter.shape
        assert state["codes"].dtype == torch.uint8
        assert all(type(value) in (torch.Tensor, type(None)) for value in state[0]["list"])
