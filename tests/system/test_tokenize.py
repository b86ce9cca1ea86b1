"""`llmtrain tokenize` makes a set, whole or in parts, and a run trains on it as on its records."""

import json
from pathlib import Path

import pytest

from llmtrain.data import shards
from llmtrain.data import tokenizer as tok
from llmtrain.files import read_sealed
from tests.command_line import run_cli
from tests.data.preparation import write_texts
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, SIX_STEPS, metrics, read_json

TEXTS = [f"text {number} of many, {'word ' * (number % 7)}" for number in range(40)]
OWN_ROWS = """
import datasets
import llmtrain as lt
from recipes.gpt import DEFAULTS, build

def main(argv):
    settings = lt.parse(DEFAULTS, argv)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8})
    return lt.fit(settings, lt.Tokenized.of(rows, tokenizer=None), build)
"""
SIZES = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe, and its flags for six shards of texts and a tokenizer in a folder."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", 7)
    texts = write_texts(tmp_path / "texts.jsonl", TEXTS)
    first = tmp_path / "first"
    # The tokenizer is trained on the texts, and then named.
    trained = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8)
    trained.save_pretrained(first / "tokenizer")
    data = ["--dataset", str(texts), "--tokenizer", str(first / "tokenizer")]
    return [GPT, *data, "--block_size", "16", "--eval_fraction", "0.2"]


def tokenize(capsys: Capture, *words: object) -> tuple[int, str, str]:
    return run_cli(capsys, "tokenize", *map(str, words))


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_parts_make_the_same_set_as_one_process(tmp_path, capsys, flags):
    whole = tmp_path / "whole"
    status, out, _ = tokenize(capsys, *flags, "--to", whole, "--json")
    assert status == 0
    assert json.loads(out)["files"] == len(contents_of(whole)) == 12

    parts = tmp_path / "parts"
    for part in (2, 1):
        assert tokenize(capsys, *flags, "--to", parts, "--shard", f"{part}/3")[0] == 0
    status, _, err = tokenize(capsys, *flags, "--to", parts, "--finish")
    assert status == 2
    assert "2 shards of" in err
    assert "are missing, such as number 3" in err
    assert tokenize(capsys, *flags, "--to", parts, "--shard", "3/3")[0] == 0
    assert tokenize(capsys, *flags, "--to", parts, "--finish")[0] == 0

    assert contents_of(parts) == contents_of(whole)
    assert read_sealed(parts / "manifest.json") == read_sealed(whole / "manifest.json")
    assert sorted(path.name for path in parts.glob("shard-*")) == []
    assert "complete already" in tokenize(capsys, *flags, "--to", parts)[2]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--shard 3/2", "give the number of a part and the number of all parts"),
        ("--shard 0/2", "give the number of a part and the number of all parts"),
        ("--shard 1/2 --finish", "leave one of them out"),
        ("--shard 1/2 --tokenizer byte", "--tokenizer byte needs all records"),
        ("--shard 1/2 --max_train_samples 9", "--max_train_samples needs all records"),
        ("--finish --max_train_samples 9", "--max_train_samples needs all records"),
        ("--shard 1/2 --eval_fraction 0.0001", "chooses none, or most) needs all records"),
        ("--to https://host/set", "is no address that can be written"),
    ],
)
def test_what_cannot_be_made_is_one_line(words, error, tmp_path, capsys, flags):
    status, _, err = tokenize(capsys, *flags, "--to", tmp_path / "set", *words.split())
    assert status == 2
    assert error in err.splitlines()[-1]
    assert not (tmp_path / "set" / "manifest.json").exists()


def test_a_folder_with_other_files_or_another_set_is_one_line(tmp_path, capsys, flags):
    assert "has other files" in tokenize(capsys, *flags, "--to", tmp_path)[2]

    made = tmp_path / "set"
    assert tokenize(capsys, *flags, "--to", made, "--shard", "1/2")[0] == 0
    other = [*flags, "--block_size", "32", "--to", made]
    assert "has shards of another set" in tokenize(capsys, *other)[2]
    assert tokenize(capsys, *flags, "--to", made)[0] == 0
    assert "is another set" in tokenize(capsys, *other)[2]
    again = [GPT, "--dataset", str(made), *flags[5:7], "--to", tmp_path / "again"]
    assert "tokenised already" in tokenize(capsys, *again)[2]


def test_rows_that_a_recipe_makes_itself_cannot_be_tokenised(tmp_path, capsys):
    recipe = tmp_path / "own.py"
    recipe.write_text(OWN_ROWS)
    status, _, err = tokenize(capsys, recipe, "--to", tmp_path / "set")
    assert status == 2
    assert "makes its rows itself, with Tokenized.of" in err


def test_a_run_on_a_set_is_the_run_on_its_records(tmp_path, capsys, flags, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_RECORDS", 100_000)  # as in the processes of the runs
    made = tmp_path / "set"
    assert tokenize(capsys, *flags, "--to", made)[0] == 0
    runs = {}
    for name, data in {"records": flags[1:], "set": ["--dataset", str(made), *flags[5:7]]}.items():
        runs[name] = tmp_path / f"run-{name}"
        command = [*PYTHON, GPT, *SIZES, *SIX_STEPS, *data, "--output_dir", str(runs[name])]
        run_forked(command).assert_ok()

    fingerprints = [read_json(run / "run.json")["fingerprint"] for run in runs.values()]
    assert fingerprints[0] == fingerprints[1]
    losses = [[entry.get("train/loss") for entry in metrics(run)] for run in runs.values()]
    assert losses[0] == losses[1]
    status, out, _ = run_cli(capsys, "rows", str(runs["set"]), "--step", "2")
    assert status == 0
    assert "metrics.jsonl has" in out
    assert run_cli(capsys, "rows", str(made), "--row", "1")[0] == 0
