"""`llmtrain tokenize --loss_top_k` writes a teacher's scores to the rows, for runs without it."""

import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedConfig

from llmtrain.data import shards
from llmtrain.data import tokenizer as tok
from llmtrain.data.loader import IGNORED
from llmtrain.data.tokenized import Tokenized
from llmtrain.files import read_sealed, write_sealed
from tests.data.chat_records import chat_records
from tests.data.preparation import write_records, write_texts
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, read_json, series
from tests.models.small_models import byte_tokenizer, tiny_llama
from tests.system.test_tokenize import TEXTS, contents_of, tokenize

DISTILL = "recipes/distill.py"
SCORED_SHARD = 7 * 32  # shards of scored rows are 32 times smaller than others
VOCABULARY = 259
# A process that is killed while it scores its seventh micro-batch.
KILLED = """
import os, signal
from itertools import count
from llmtrain.cli import main
from llmtrain.data import shards
from llmtrain.training.teacher_scorer import TeacherScorer

shards.SHARD_RECORDS = 7 * 32
scores = TeacherScorer._scores
passes = count(1)

def killed(self, *arguments):
    if next(passes) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return scores(self, *arguments)

TeacherScorer._scores = killed
main()
"""


def write_model(folder: Path, config: PreTrainedConfig, seed: int, unused_rows: int = 0) -> Path:
    """Write a model with large random weights, with some rows of its head that no token has."""
    config.vocab_size = VOCABULARY + unused_rows
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tok.set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    gemma2 = Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=3.0,
    )
    return SimpleNamespace(
        llama=write_model(folder / "llama", tiny_llama(), seed=1, unused_rows=5),
        gemma2=write_model(folder / "gemma2", gemma2, seed=2),
        student=write_model(folder / "student", tiny_llama(), seed=3),
    )


@pytest.fixture
def flags(tmp_path: Path, models: SimpleNamespace) -> list[str]:
    """The recipe, with a student, its teacher and some chats."""
    chats = write_records(tmp_path / "chats.jsonl", chat_records(30))
    data = ["--dataset", str(chats), "--max_length", "64", "--eval_fraction", "0.2"]
    teacher = ["--teacher_model_name_or_path", str(models.llama), "--loss_top_k", "4"]
    return [DISTILL, "--model_name_or_path", str(models.student), *data, *teacher]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make five shards of thirty records."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", SCORED_SHARD)


def expected_scores(
    model: torch.nn.Module, row: dict[str, list[int]], k: int, temperature: float
) -> dict[str, np.ndarray]:
    """Return the scores of a row in float64, each document computed by itself."""
    ids = np.maximum(row["input_ids"], 0)
    labels = row.get("labels", row["input_ids"])
    starts = [0]
    if "position_ids" in row:
        starts = np.flatnonzero(np.array(row["position_ids"]) == 0).tolist()
    documents = np.split(ids, starts[1:])
    logits = torch.cat([model(torch.tensor(document[None])).logits[0] for document in documents])

    scores = {
        "teacher_ids": np.zeros((len(ids), k)),
        "teacher_logps": np.zeros((len(ids), k)),
        "teacher_rest": np.zeros(len(ids)),
        "teacher_logp": np.zeros(len(ids)),
    }
    for t in range(1, len(ids)):
        if labels[t] == IGNORED:
            continue
        scores["teacher_logp"][t] = logits[t - 1].log_softmax(0)[labels[t]]
        logps = (logits[t - 1] / temperature).log_softmax(0)
        ordered = logps[:VOCABULARY].sort(descending=True)
        scores["teacher_ids"][t] = ordered.indices[:k]
        scores["teacher_logps"][t] = ordered.values[:k]
        others = torch.cat([ordered.values[k:], logps[VOCABULARY:]])
        scores["teacher_rest"][t] = others.logsumexp(0).clamp(min=-1e4)
    return scores


@pytest.mark.parametrize(
    ("words", "teacher", "k", "temperature"),
    [
        ("", "llama", 4, 2.0),
        ("--no_packing", "llama", 4, 1.0),
        ("", "llama", VOCABULARY, 1.0),
        ("--no_packing", "gemma2", 8, 2.0),
        ("", "gemma2", VOCABULARY, 1.0),
        ("text", "llama", 4, 2.0),
        ("text --isolate_documents", "llama", 4, 2.0),
    ],
)
@torch.no_grad()
def test_scores_are_those_of_the_teacher(
    words, teacher, k, temperature, tmp_path, capsys, flags, models
):
    more = [word for word in words.split() if word != "text"]
    if "text" in words:
        more += ["--dataset", str(write_texts(tmp_path / "texts.jsonl", TEXTS))]
    folder = getattr(models, teacher)
    more += ["--teacher_model_name_or_path", str(folder)]
    more += ["--loss_top_k", str(k), "--temperature", str(temperature)]
    status, _, err = tokenize(capsys, *flags, *more, "--to", tmp_path / "set")
    assert status == 0, err

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = Tokenized.open(tmp_path / "set")
    assert rows.is_packed == (words in ("", "text --isolate_documents"))
    if rows.is_packed:
        assert sum(position == 0 for position in rows.train[0]["position_ids"]) > 1
    count = 0
    for row in (*rows.train, *rows.eval):
        labels = row.get("labels", row["input_ids"])
        count += sum(label != IGNORED for label in labels[1:])
        for name, expected in expected_scores(model, row, k, temperature).items():
            tolerance = 2e-3 if name == "teacher_logps" else 2e-5
            assert np.allclose(row[name], expected, rtol=tolerance, atol=tolerance), name
    assert count == rows.metadata.train_tokens + rows.metadata.eval_tokens

    manifest = read_json(tmp_path / "set" / "manifest.json")
    assert {shard["precision"] for shard in manifest["train"][0]["shards"]} == {"no"}
    made_with = manifest["made_from"]["teacher"]
    assert (made_with["loss_top_k"], made_with["temperature"]) == (k, temperature)
    assert len(made_with["weights"]["sha256"]) == 64


def test_parts_and_kills_change_no_byte(tmp_path, capsys, flags, small_shards):
    whole = tmp_path / "whole"
    assert tokenize(capsys, *flags, "--to", whole)[0] == 0
    assert len(contents_of(whole)) == 10

    killed = tmp_path / "killed"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    ended = run_forked([*PYTHON, str(script), "tokenize", *flags, "--to", str(killed)])
    assert ended.status == signal.SIGKILL
    assert 0 < len([*killed.glob("shard-*.json")]) < 5
    assert [*killed.glob(".tmp-*-unscored")] != []
    assert tokenize(capsys, *flags, "--to", killed)[0] == 0

    parts = tmp_path / "parts"
    for words in (["--shard", "2/2"], ["--shard", "1/2"]):
        assert tokenize(capsys, *flags, "--to", parts, *words)[0] == 0
    path = next(parts.glob("shard-*.json"))
    facts = read_sealed(path)
    write_sealed(path, {**facts, "train": {**facts["train"], "precision": "bf16"}})
    status, _, err = tokenize(capsys, *flags, "--to", parts, "--finish")
    assert status == 2
    assert "parts of the set in different precisions" in err
    write_sealed(path, facts)
    assert tokenize(capsys, *flags, "--to", parts, "--finish")[0] == 0

    for folder in (killed, parts):
        assert contents_of(folder) == contents_of(whole)
        assert read_sealed(folder / "manifest.json") == read_sealed(whole / "manifest.json")
        assert [*folder.glob(".tmp-*")] == []


def test_a_complete_set_needs_no_teacher_in_memory(tmp_path, capsys, flags, monkeypatch, models):
    made = tmp_path / "set"
    assert tokenize(capsys, *flags, "--to", made)[0] == 0
    monkeypatch.setattr("llmtrain.training.teacher_scorer.load_teacher", None)
    assert "is complete already" in tokenize(capsys, *flags, "--to", made)[2]
    for other in (["--temperature", "2"], ["--teacher_model_name_or_path", str(models.student)]):
        assert "is another set" in tokenize(capsys, *flags, *other, "--to", made)[2]


def test_the_estimate_says_disk_and_time_before_the_first_row(tmp_path, capsys, flags, monkeypatch):
    made = tmp_path / "set"
    _, _, err = tokenize(capsys, *flags, "--loss_top_k", "64", "--to", made)
    size = sum(map(len, contents_of(made).values()))
    estimate = float(err.split("tokens, ")[1].split(" MB on disk")[0])
    assert abs(estimate - size / 1e6) < 0.1
    assert "minutes" in err

    shutil.rmtree(made)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size // 2))
    status, _, err = tokenize(capsys, *flags, "--loss_top_k", "64", "--to", made)
    assert status == 2
    assert "has no room: the rows with their scores take about" in err.splitlines()[-1]
    assert contents_of(made) == {}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--loss_top_k 300", "--loss_top_k 300 is more than the vocabulary has: 259 tokens"),
        ("--teacher_model_name_or_path nothing", "nothing is no folder, and the hub did not"),
        ("--tokenizer bpe:300", "has another vocabulary than the rows"),
    ],
)
def test_what_a_teacher_cannot_score_is_one_line(words, error, tmp_path, capsys, flags):
    status, _, err = tokenize(capsys, *flags, *words.split(), "--to", tmp_path / "set")
    assert status == 2
    assert error in err.splitlines()[-1]
    assert contents_of(tmp_path / "set") == {}


def test_scores_that_are_not_finite_are_one_line(tmp_path, capsys, flags, models):
    broken = shutil.copytree(models.llama, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    (question_mark,) = byte_tokenizer().encode("?")
    model.model.embed_tokens.weight.data[question_mark] = torch.nan
    model.save_pretrained(broken)
    more = ["--teacher_model_name_or_path", str(broken), "--to", tmp_path / "set"]
    status, _, err = tokenize(capsys, *flags, *more)
    assert status == 2
    assert "the teacher's log-probabilities are not finite" in err.splitlines()[-1]
    assert contents_of(tmp_path / "set") == {}


def test_runs_take_a_scored_set_that_fits_their_flags(tmp_path, capsys, flags, models):
    chats = flags[4]
    teacher = ["--teacher_model_name_or_path", str(models.llama)]
    made = str(tmp_path / "set")
    other = str(tmp_path / "other")
    assert tokenize(capsys, *flags, "--to", made)[0] == 0
    assert tokenize(capsys, *flags, "--temperature", "2", "--to", other)[0] == 0
    student = ["--model_name_or_path", str(models.student), "--output_dir", str(tmp_path / "run")]
    run = [*student, "--max_steps", "1", "--dry_run", "--max_length", "64", "--dataset"]

    run_forked([*PYTHON, FINETUNE, *run, made]).assert_ok()
    run_forked([*PYTHON, DISTILL, *run, made, "--loss_top_k", "4"]).assert_ok()
    errors = {
        f"{other} --loss_top_k 4": "was scored with --temperature 2 --loss_top_k 4; set the same",
        f"{made} --loss_top_k 5": "was scored with --temperature 1 --loss_top_k 4; set the same",
        f"{made} --beta 0.5": "--beta 0.5 needs the teacher's probabilities of all tokens",
        f"{made} {other}": "were not scored by the same teacher",
        f"{made} {chats}": "were not scored by the same teacher",
        f"{made} {' '.join(teacher)}": "has the scores of its teacher, so training loads none",
        f"{made} {' '.join(teacher)} --rounds 2": "was made with --packing True, and this run wants False",
        f"{chats} --loss_top_k 4 {' '.join(teacher)}": "--loss_top_k is for llmtrain tokenize",
        f"{chats}": "name a teacher with --teacher_model_name_or_path, or a data set that was",
    }
    for words, error in errors.items():
        ended = run_forked([*PYTHON, DISTILL, *run, *words.split()])
        assert ended.status == 2, words
        assert error in ended.err.splitlines()[-1]
    without = [word for word in flags if word not in teacher]
    status, _, err = tokenize(capsys, *without, "--to", tmp_path / "more")
    assert status == 2
    assert "--loss_top_k needs --teacher_model_name_or_path" in err


@torch.no_grad()
@pytest.mark.parametrize("k", [4, VOCABULARY])
def test_a_run_without_a_teacher_has_a_lower_bound_of_the_loss(
    k, tmp_path, capsys, flags, models, score
):
    made = tmp_path / "set"
    teacher = ["--teacher_model_name_or_path", str(models.gemma2)]
    scored = [*flags, *teacher, "--loss_top_k", str(k), "--temperature", "2", "--to", made]
    assert tokenize(capsys, *scored)[0] == 0
    rows = Tokenized.open(made)
    # The first step has all rows.
    size = str(len(rows.train))
    run = ["--max_steps", "2", "--logging_steps", "1", "--global_batch_size", size]
    run += ["--temperature", "2"]
    losses = {}
    for name, words in {"live": [*flags[3:5], *teacher], "rows": ["--dataset", str(made)]}.items():
        folder = tmp_path / name
        command = [*PYTHON, *flags[:3], *flags[5:9], *words, *run, "--output_dir", str(folder)]
        run_forked(command).assert_ok()
        losses[name] = series(folder, "train/loss")[1]

    model = AutoModelForCausalLM.from_pretrained(models.student, dtype=torch.float64)
    divergences = []
    for row in rows.train:
        starts = np.flatnonzero(np.array(row["position_ids"]) == 0).tolist()
        documents = np.split(np.array(row["input_ids"]), starts[1:])
        logits = torch.cat([model(torch.tensor(ids[None])).logits[0] for ids in documents])
        log_q = (logits / 2).log_softmax(1).roll(1, 0)
        ids = torch.tensor(row["teacher_ids"])
        rest_q = log_q.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True).clamp(min=-1e4)
        log_q = torch.cat([log_q.gather(1, ids), rest_q], 1)
        rest_p = torch.tensor(row["teacher_rest"], dtype=torch.float64)[:, None]
        log_p = torch.cat([torch.tensor(row["teacher_logps"]).double(), rest_p], 1).log_softmax(1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(1)
        divergences.append(divergence[torch.tensor(row["labels"]) != IGNORED])
    expected = torch.cat(divergences).mean().item()
    score(f"top {k} of {VOCABULARY}: {losses}, in float64 {expected}")
    assert math.isclose(losses["rows"], expected, rel_tol=1e-5)
    if k == VOCABULARY:
        assert math.isclose(losses["rows"], losses["live"], rel_tol=1e-3)
    else:
        assert losses["rows"] < losses["live"]
