"""A metric has the same value on one process and on two, with DDP, FSDP2 and --bitwise."""

import shlex

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, accelerate, read_json

SCRIPT = "tests/system/metric_ranks.py"
METRICS = {
    *shlex.split("loss loss/first loss/second perplexity accuracy accuracy_by_forward z_loss rows")
}

# A value for each model, engine and metric.
Metrics = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    path = tmp_path_factory.mktemp("metrics") / "metrics.json"
    run_forked([*PYTHON, SCRIPT, str(path)]).assert_ok()
    return read_json(path)


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    path = tmp_path_factory.mktemp("metrics") / "metrics.json"
    launcher = accelerate("fsdp2")
    run_forked([*launcher, SCRIPT, str(path)]).assert_ok()
    return read_json(path)


@pytest.mark.parametrize("model", ["gpt2", "lfm2", "llama", "own"])
def test_a_metric_does_not_depend_on_the_layout_or_the_engine(
    model: str, on_one_process: Metrics, on_two_processes: Metrics
) -> None:
    reference = on_one_process[model]["plain"]
    assert reference.keys() == METRICS
    assert reference["rows"] == 11
    assert reference["loss/first"] != reference["loss/second"]
    if model != "llama":  # called by itself, it lets the packed documents of a row see each other
        assert reference["accuracy"] == reference["accuracy_by_forward"]

    for engine in ("DDP", "FSDP2", "bitwise"):
        metrics = on_two_processes[model][engine]
        assert metrics == pytest.approx(reference, rel=1e-5), engine

    bits = on_one_process[model]["bitwise"]
    assert on_two_processes[model]["bitwise"] == bits
