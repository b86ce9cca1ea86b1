"""A metric has the same value on one process and on two, with DDP, FSDP2 and --bitwise."""

import json
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import PYTHON, accelerate

SCRIPT = "tests/system/metric_ranks.py"


def test_metrics_do_not_depend_on_the_layout_nor_on_the_engine(tmp_path: Path) -> None:
    run_forked([*PYTHON, SCRIPT, str(tmp_path / "one.json")]).assert_ok()
    launcher = accelerate("fsdp2", "--mixed_precision", "no")
    run_forked([*launcher, SCRIPT, str(tmp_path / "two.json")]).assert_ok()
    on_one = json.loads((tmp_path / "one.json").read_text())
    on_two = json.loads((tmp_path / "two.json").read_text())

    assert on_one.keys() == on_two.keys() == {"gpt2", "lfm2", "llama", "recurrent"}
    for model, by_engine in on_one.items():
        plain = by_engine["plain"]
        assert plain.keys() == {"loss", "perplexity", "right", "right_by_call", "z", "rows"}
        assert plain["rows"] == 11
        assert plain["right"] == plain["right_by_call"]
        for engine in ("DDP", "FSDP2", "bitwise"):
            assert on_two[model][engine] == pytest.approx(plain, rel=1e-5), (model, engine)
        assert on_two[model]["bitwise"] == by_engine["bitwise"]
