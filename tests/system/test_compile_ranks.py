"""Processes that share a model compile its blocks together, or none does, and all say why."""

from typing import Any

import pytest

from tests.forked import run_forked
from tests.launching import accelerate, long_form, read_json

SCRIPT = "tests/system/compile_ranks.py"
FAILURES = {
    "fails at once": "rank 1: no C++ compiler here",
    "fails in backward": "rank 1: no room for the backward pass",
}
CASES = [f"{case}, {wanted}" for case in ("works", *FAILURES) for wanted in ("always", "auto")]


@pytest.fixture(scope="module", params=[pytest.param("no", marks=long_form), "bf16"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of two processes found in all cases; in bf16 blocks hold units of their own."""
    folder = tmp_path_factory.mktemp("compiling")
    launcher = accelerate("fsdp2", "--mixed_precision", request.param)
    run_forked([*launcher, SCRIPT, str(folder), *CASES], timeout=60).assert_ok()
    return [read_json(folder / f"{rank}.json") for rank in (0, 1)]


@pytest.mark.parametrize("failure", FAILURES)
def test_all_ranks_say_why_one_cannot_compile_if_that_was_asked_for(failure: str, found) -> None:
    for rank in found:
        error = rank[f"{failure}, always"]["error"]
        assert error.startswith(f"torch.compile does not work here: {FAILURES[failure]};")


@pytest.mark.parametrize("failure", FAILURES)
def test_no_rank_compiles_if_one_cannot_and_the_run_goes_on(failure: str, found) -> None:
    for rank in found:
        readings = rank[f"{failure}, auto"]
        assert readings["is compiled"] is False
        assert readings["compiled blocks"] == 0
        assert readings["gradients apart"] == 0


@pytest.mark.parametrize("wanted", ["always", "auto"])
def test_compiled_blocks_of_a_sharded_model_compute_what_they_computed(wanted: str, found) -> None:
    for rank in found:
        readings = rank[f"works, {wanted}"]
        assert readings["is compiled"] is True
        assert readings["compiled blocks"] == 2
        assert readings["gradients apart"] < 1e-5


def test_trying_to_compile_a_sharded_model_leaves_no_trace(found) -> None:
    for rank in found:
        for case, readings in rank.items():
            assert readings["random numbers as before"], case
            assert readings["gradients left"] == 0, case
            assert readings["all sharded"], case
