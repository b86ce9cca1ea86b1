"""Data in the formats that people have: one command trains on each, with the right targets."""

import gzip
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, SMALL_SIZE, series

END = "<|im_end|>"
# The command marks targets with angle quotation marks, which the tests write as brackets.
TO_BRACKETS = str.maketrans(
    {
        "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}": "[[",
        "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}": "]]",
    }
)
COUNT = 24  # records of each data set


# --- data sets
# Each function writes one, and returns the flags that name it. The record with number N ends with
# the answer N.


TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"limit": {"default": None}}},
    },
}


def write_sharegpt(folder: Path) -> str:
    records = []
    for i in range(COUNT):
        call = {"name": "search", "arguments": {"limit": None, "page": i}}
        conversation = [
            {"from": "human", "value": f"find {i}"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": f"found {i}"},
            {"from": "gpt", "value": f"It is {i}."},
        ]
        records.append({"conversations": conversation, "tools": json.dumps([TOOL])})
    with gzip.open(folder / "sharegpt.json.gz", "wt") as file:
        json.dump(records, file)
    return f"--dataset {folder}/sharegpt.json.gz"


def write_hub_folder(folder: Path) -> str:
    """Write Parquet files of three splits, as in a data set of the hub."""
    data = folder / "ultra" / "data"
    data.mkdir(parents=True)
    for split, first in (("train_sft", 0), ("test_sft", 100), ("train_gen", 200)):
        rows = []
        for i in range(first, first + COUNT):
            messages = [
                {"role": "user", "content": f"ask {i}"},
                {"role": "assistant", "content": f"It is {i}."},
            ]
            rows.append({"prompt": f"p{i}", "messages": messages})
        path = data / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    return f"--dataset {folder}/ultra --dataset_train_split train_sft --dataset_test_split test_sft"


TOOL_CALL = '{"name": "search", "arguments": {"limit": null, "page": N}}'


@pytest.mark.parametrize(
    ("write", "targets"),
    [
        pytest.param(
            write_sharegpt,
            [f"[[<tool_call>\n{TOOL_CALL}\n</tool_call>{END}]]", f"[[It is N.{END}]]"],
            id="ShareGPT with tools",
        ),
        pytest.param(write_hub_folder, [f"[[It is N.{END}]]"], id="splits of a hub folder"),
    ],
)
def test_one_command_trains_on_the_data_with_the_right_targets(
    write: Callable[[Path], str],
    targets: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """The targets are those of the record with number N, as `llmtrain rows` shows them."""
    folder = tmp_path / "run"
    flags = shlex.split(
        f"{write(tmp_path)} --config_overrides {SMALL_SIZE} --tokenizer byte "
        "--global_batch_size 4 --max_steps 4 --logging_steps 1 --learning_rate 1e-2 "
        f"--report_to none --output_dir {folder}"
    )

    status, rows, err = run_cli(capsys, "rows", FINETUNE, *flags)
    assert status == 0, err
    assert not folder.exists()
    assert_targets(rows.translate(TO_BRACKETS), targets)

    run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()
    losses = series(folder, "train/loss")
    assert len(losses) == 4
    for loss in (*losses.values(), *series(folder, "eval/loss").values()):
        assert math.isfinite(loss)


def assert_targets(rows: str, targets: list[str]) -> None:
    """Assert that rows show the targets of several records, and no others."""

    def target_of(number: int, template: str) -> str:
        # "N" is a number, unless it is part of a word.
        return re.sub(r"\bN\b", str(number), template)

    numbers = [i for i in range(COUNT) if target_of(i, targets[-1]) in rows]
    assert len(numbers) > 1
    for number in numbers:
        for target in targets:
            assert target_of(number, target) in rows
    assert "[[ask" not in rows
