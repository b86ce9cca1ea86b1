"""`llmtrain rows` prints the rows of a step: the text of the source, and the nll of transformers."""

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.commands import rows as rows_command
from llmtrain.errors import UserError
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    SIX_STEPS,
    SMALL_SIZE,
    TINY,
    make_look_killed,
    metrics,
    read_json,
    torchrun,
    write_chats,
    write_pairs,
)

LEFT = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"
RIGHT = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
LLAMA = shlex.split(
    f"--from_config llama --config_overrides {SMALL_SIZE} --tokenizer byte --max_length 96"
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder with a run of each recipe, and their data."""
    folder = tmp_path_factory.mktemp("rows")
    chats = write_chats(folder / "chats.jsonl")
    pairs = write_pairs(folder / "pairs.jsonl")
    shutil.copy(text_file, folder / "text.txt")

    train(folder, "gpt", GPT, [*TINY, "--dataset", str(folder / "text.txt")], torchrun(2))
    train(folder, "packed", FINETUNE, [*LLAMA, *SIX_STEPS, "--dataset", str(chats)])
    unpacked = [*LLAMA, *SIX_STEPS, "--no_packing", "--dataset", str(chats)]
    train(folder, "unpacked", FINETUNE, unpacked)
    train(folder, "preference", PREFERENCE, [*LLAMA, *SIX_STEPS, "--dataset", str(pairs)])
    return folder


def train(
    folder: Path, name: str, recipe: str, flags: list[str], launcher: list[str] = PYTHON
) -> None:
    command = [*launcher, recipe, "--save_steps", "3", *flags, "--output_dir", str(folder / name)]
    run_forked(command).assert_ok()


def rows_of(capsys: Capture, *words: object) -> list[dict[str, Any]]:
    status, out, err = run_cli(capsys, "rows", *map(str, words), "--json")
    assert status == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


def assert_same(capsys: Capture, run: Path, step: int) -> None:
    """Assert that the command prints the rows of a step with the fingerprint that is logged."""
    (logged,) = {
        entry["batch"] for entry in metrics(run) if entry["step"] == step and "batch" in entry
    }
    status, out, err = run_cli(capsys, "rows", str(run), "--step", str(step))
    assert status == 0, err
    assert out.startswith(f"same      step {step} had these rows: metrics.jsonl has {logged}")
    assert len(re.findall("^===== row ", out, re.MULTILINE)) == 8


def test_rows_are_drawn_in_windows_if_the_data_have_more_shards(capsys, tmp_path, text_file):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().swapcase())
    flags = [*TINY, "--shuffle_window", "1", "--dataset", str(text_file), str(other)]
    train(tmp_path, "run", GPT, flags)
    run = tmp_path / "run"
    assert_same(capsys, run, 3)
    assert read_json(run / "run.json")["fingerprint"]["order"] == "shuffled in windows of 1 shards"

    first_rows = read_json(run / "run.json")["source_rows"][0]
    numbers = [row["row"] for row in rows_of(capsys, run, "--step", 1)]
    assert len({number <= first_rows for number in numbers}) == 1


def documents_of(text: str) -> list[str]:
    """Return the documents of a row, without its padding."""
    text = re.sub(r"\n----- \d+ padding tokens?$", "", text)
    return text.split("\n----- the next document\n")


def nll_by_transformers(model: Path, text: str) -> float:
    """Return the mean nll of the marked tokens of a row, each document alone."""
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    nlls = []
    for document in documents_of(text):
        ids: list[int] = []
        is_target: list[bool] = []
        for piece in re.split(f"({LEFT}[^{RIGHT}]*{RIGHT})", document):
            new = tokenizer(piece.strip(LEFT + RIGHT))["input_ids"]
            ids += new
            is_target += [piece.startswith(LEFT)] * len(new)
        with torch.no_grad():
            logits = loaded(torch.tensor([ids])).logits[0, :-1].double()
        nll = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        nlls += nll[torch.tensor(is_target[1:])].tolist()
    return sum(nlls) / len(nlls)


@pytest.mark.parametrize("name", ["gpt", "packed", "unpacked", "preference"])
def test_the_rows_of_a_step_are_those_that_the_run_has_logged(
    name: str, folder: Path, capsys: Capture
) -> None:
    before = sorted(folder.rglob("*"))
    for step in (1, 6):
        assert_same(capsys, folder / name, step)
    assert sorted(folder.rglob("*")) == before

    rows = rows_of(capsys, folder / name, "--step", 6)
    if name == "preference":
        assert [row["nll"] for row in rows] == [None] * 8
        assert rows[0]["text"].count("----- the other answer") >= 1
        return
    for row in rows[:3]:
        expected = nll_by_transformers(folder / name / "model", row["text"])
        assert row["nll"] == pytest.approx(expected, rel=1e-5)

    (first,) = rows_of(capsys, folder / name, "--row", rows[0]["row"])
    assert first == pytest.approx(rows[0])
    checkpoint = folder / name / "checkpoints" / "step-00000003"
    (earlier,) = rows_of(
        capsys, folder / name, "--row", first["row"], "--checkpoint", checkpoint.name
    )
    expected = nll_by_transformers(checkpoint / "model", first["text"])
    assert earlier == {**first, "nll": pytest.approx(expected, rel=1e-5)}
    assert len({row["row"] for row in rows_of(capsys, folder / name, "--random", 5)}) == 5


def test_the_text_is_that_of_the_source(folder: Path, capsys: Capture) -> None:
    source = (folder / "text.txt").read_text()
    for row in rows_of(capsys, folder / "gpt", "--step", 2):
        text = row["text"].replace(LEFT, "").replace(RIGHT, "")
        assert text.replace("<|endoftext|>", "") in source

    tokenizer = AutoTokenizer.from_pretrained(folder / "packed/model")
    records = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    rendered = {
        tokenizer.apply_chat_template(record["messages"], tokenize=False).strip()
        for record in records
    }
    shown = [
        document.replace(LEFT, "").replace(RIGHT, "")
        for row in rows_of(capsys, folder / "packed", "--step", 4)
        for document in documents_of(row["text"])
    ]
    assert len(shown) >= 8
    assert {document.strip() for document in shown} <= rendered


def test_a_recipe_shows_the_rows_that_its_run_has(folder: Path, capsys: Capture) -> None:
    flags = [*LLAMA, *SIX_STEPS, "--dataset", folder / "chats.jsonl"]
    planned = rows_of(capsys, FINETUNE, "--step", 6, *flags)
    trained = rows_of(capsys, folder / "packed", "--step", 6)
    assert planned == [{**row, "nll": None} for row in trained]


def test_a_recipe_shows_the_targets_of_tools_in_a_compressed_file(
    tmp_path: Path, capsys: Capture
) -> None:
    call = {"name": "search", "arguments": {"limit": None, "page": 1}}
    conversation = [
        {"from": "human", "value": "find"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "found"},
        {"from": "gpt", "value": "It is here."},
    ]
    with gzip.open(tmp_path / "sharegpt.json.gz", "wt") as file:
        json.dump([{"conversations": conversation}] * 24, file)

    flags = [*LLAMA, "--max_length", "256", "--dataset", tmp_path / "sharegpt.json.gz"]
    [row] = rows_of(capsys, FINETUNE, "--row", 0, *flags)

    targets = re.findall(f"{LEFT}([^{RIGHT}]*){RIGHT}", documents_of(row["text"])[0])
    assert targets == [
        f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>",
        "It is here.<|im_end|>",
    ]


def test_a_resumed_and_an_extended_run_have_the_rows_of_each_step(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(folder / "gpt", killed)
    make_look_killed(killed, step=3)
    flags = [*TINY, "--dataset", str(folder / "text.txt")]
    train(tmp_path, "killed", GPT, flags)
    assert len(read_json(killed / "run.json")["starts"]) == 2
    extended = [*flags, "--max_steps", "8", "--resume_from_checkpoint"]
    train(tmp_path, "longer", GPT, [*extended, str(killed / "checkpoints/step-00000006")])

    for step in (2, 5):
        assert_same(capsys, killed, step)
        texts = [
            [row["text"] for row in rows_of(capsys, run, "--step", step)]
            for run in (killed, tmp_path / "longer", folder / "gpt")
        ]
        assert texts[0] == texts[1] == texts[2]
    assert_same(capsys, tmp_path / "longer", 8)


# --- errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rows {gpt} --step 7", "steps 1 to 6"),
        ("rows {gpt} --row 99999", "the rows are 0 to"),
        ("rows {gpt} --step 1 --row 1", "exclude each other"),
        ("rows {gpt} --checkpoint step-5", "checkpoints/step-5"),
        ("rows {tmp}", "{tmp}"),
        ("rows recipes/gpt.py --step 7 --max_steps 6 --dataset {text} --tokenizer byte", "1 to 6"),
    ],
)
def test_a_mistake_is_an_error_of_one_line(
    command: str, message: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    paths = {"gpt": folder / "gpt", "tmp": tmp_path, "text": folder / "text.txt"}
    assert message.format(**paths) in error_of(capsys, command.format(**paths))


def error_of(capsys: Capture, command: str) -> str:
    status, out, err = run_cli(capsys, *shlex.split(command))
    assert (status, out) == (2, "")
    *progress, line = err.splitlines()
    assert all(before.startswith(("recipe  ", "data  ", "nll  ")) for before in progress), err
    return line


def test_rows_that_are_gone_or_changed_are_an_error_of_one_line(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(folder / "gpt", copied)
    log = copied / "metrics.jsonl"
    log.write_text(re.sub(r'"batch": "', '"batch": "1', log.read_text()))
    assert "these are not the rows of step 3" in error_of(capsys, f"rows {copied} --step 3")

    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    message = error_of(capsys, f"rows {folder}/gpt --step 3")
    assert "are not in the cache" in message
    remedy = re.search(r"llmtrain rows (.*) makes them again", message)[1]
    made_again = rows_of(capsys, *shlex.split(remedy), "--step", 3)
    rows = rows_of(capsys, folder / "gpt", "--step", 3)
    assert made_again == [{**row, "nll": None} for row in rows]


def test_the_reason_for_a_missing_nll_is_printed(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_command, "_nlls", mock.Mock(side_effect=UserError("no weights")))
    status, out, err = run_cli(capsys, "rows", str(folder / "gpt"), "--json")
    assert status == 0
    assert {row["nll"] for row in json.loads(out)} == {None}
    assert "the rows have no nll: no weights" in err


def test_the_rows_of_a_run_without_a_model_have_no_nll(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "gpt", run, ignore=shutil.ignore_patterns("model", "checkpoints"))
    (run / "metrics.jsonl").write_text("")  # as with a large --logging_steps
    assert {row["nll"] for row in rows_of(capsys, run)} == {None}
