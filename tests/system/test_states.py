"""On two processes, optimizers of other packages continue after a restart bit for bit."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from llmtrain import GPT, GPTConfig
from llmtrain.record.checkpoint import read_structure
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.optimizer_state import OptimizerState
from tests.forked import run_forked
from tests.launching import accelerate, long_form, read_json
from tests.odd_optimizer import Odd

pytest.importorskip("heavyball")
pytest.importorskip("pytorch_optimizer")

LAUNCHERS = {
    "DDP": accelerate("cpu_ddp"),
    "FSDP2": accelerate("fsdp2", "--mixed_precision", "no"),
}

# The names of `state_ranks.OPTIMIZERS`.
SHARDABLE = ["odd", "odd in bf16", "8-bit adamw", "adamw", "muon", "schedule-free"]
# heavyball before 3.2.1 finds the state of a tensor by its address, which is 0 for every DTensor.
HEAVYBALL = ["heavyball soap", "heavyball adamw"]
ONLY_REPLICATED = ["pytorch_optimizer soap"]


class Results(NamedTuple):
    """The results of state_ranks.py in one layout."""

    layout: str
    folder: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["DDP", pytest.param("FSDP2", marks=long_form)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    layout = request.param
    folder = tmp_path_factory.mktemp("states")
    optimizers = [*SHARDABLE, *HEAVYBALL, *ONLY_REPLICATED]
    command = [*LAUNCHERS[layout], "tests/system/state_ranks.py", str(folder), *optimizers]

    # heavyball compiles every function, which takes half a minute.
    run_forked(command, {"TORCHDYNAMO_DISABLE": "1"}).assert_ok()

    ranks = [read_json(folder / f"rank-{rank}.json") for rank in range(2)]
    return Results(layout=layout, folder=folder, ranks=ranks)


# --- restarts


def test_an_optimizer_continues_after_a_restart_bit_for_bit(results: Results) -> None:
    names = [*SHARDABLE]
    if results.layout == "DDP":
        names += [*HEAVYBALL, *ONLY_REPLICATED]

    for rank in results.ranks:
        differences = {name: rank["restarts"][name] for name in names}
        assert differences == {name: [] for name in names}


@long_form
@pytest.mark.parametrize("results", ["FSDP2"], indirect=True)
def test_an_optimizer_that_cannot_be_sharded_ends_in_an_error(results: Results) -> None:
    errors = ("the optimizer SOAP fails on", "the optimizer AdamW fails on")
    for rank in results.ranks:
        for name in ONLY_REPLICATED:
            assert rank["restarts"][name].startswith(errors), name
        for name in HEAVYBALL:
            outcome = rank["restarts"][name]
            assert outcome == [] or outcome.startswith(errors), name


def test_the_state_of_an_optimizer_is_restored_in_a_run_on_one_process(results: Results) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=12, block_size=8), 31)
    optimizer = Odd(model.parameters())
    saved = results.folder / "odd" / "step-00000003" / "optimizer"

    OptimizerState(model, optimizer).restore(read_structure(saved), read_tensors(saved))

    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["moment"].shape == parameter.shape
        assert state["plain"].shape == parameter.shape
        assert state["codes"].dtype == torch.uint8
        for value in state[0]["list"]:
            assert type(value) in (torch.Tensor, type(None)), "no sharded tensor"


# --- sharded and full parameters


def test_eight_bit_adamw_has_the_same_bits_with_sharded_and_full_parameters(
    results: Results,
) -> None:
    for rank in results.ranks:
        assert rank["sharding"] == []


# --- ranks that differ


@pytest.fixture
def error_beginnings(results: Results) -> dict[str, str]:
    """The beginning of the error for each case of states that differ between ranks."""
    differs = "keeps other values on rank 1 than on rank 0 in"
    beginnings = {
        "number of a part": f"Average {differs} its numbers, strings or lists; a checkpoint ",
        "tensor of a part": f"Average {differs} mean.rows; a checkpoint holds ",
        "tensor of the optimizer": f"the optimizer AdamW {differs} transformer.wte.weight.noise; ",
        "no state on rank 1": f"the optimizer AdamW {differs} transformer.wte.weight.step; ",
    }
    if results.layout == "FSDP2":
        beginnings["no state on rank 1"] = (
            "the states of rank 1 have other tensors than those of rank 0"
        )
    return beginnings


def test_states_that_differ_between_ranks_are_an_error_that_names_them(
    results: Results, error_beginnings: dict[str, str]
) -> None:
    for rank in results.ranks:
        errors = rank["differing ranks"]
        assert errors.keys() == error_beginnings.keys()
        for case, error in errors.items():
            assert error.startswith(error_beginnings[case]), case
