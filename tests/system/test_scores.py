"""`llmtrain eval` scores a model on tasks of lm-evaluation-harness, with one process and with two."""

import contextlib
import io
import json
import math
import random
import re
import shlex
import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.lab.report.page import html
from llmtrain.record.checkpoint import find_fault
from llmtrain.record.history import History
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SIX_STEPS,
    TINY,
    accelerate,
    long_form,
    run,
    start_process,
    stop_group,
    wait,
    write_chats,
)

pytest.importorskip("lm_eval", reason="needs lm-eval, which comes with the extra dev")
pytestmark = long_form

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": True,
}

# --- tasks of the harness

CHOICES_PER_QUESTION = 3

DATA_YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICE_YAML = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
LIKELIHOOD_YAML = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


def write_task(folder: Path, name: str, kind: str, count: int) -> None:
    """Write a task, and its questions. Tasks with the same count have the same questions."""
    draw = random.Random(count)
    words = ["model", "token", "batch", "kernel", "weight", "bucket", "zxq", "1234", "the", "and"]
    questions = [
        {
            "question": f"The {draw.choice(words)} {i}",
            "choices": draw.sample(words, CHOICES_PER_QUESTION),
            "answer": draw.randrange(CHOICES_PER_QUESTION),
        }
        for i in range(count)
    ]
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))

    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / f"{name}.yaml").write_text(DATA_YAML.format(name=name, data=data) + kind)


class Trained(NamedTuple):
    """A trained model, and tasks to score it on."""

    run: Path
    tasks: Path

    def questions(self, task: str) -> list[dict[str, Any]]:
        lines = (self.tasks.parent / f"{task}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Trained:
    """Train a GPT, and write the tasks "choice", "likelihood" and, for interruptions, "many"."""
    folder = tmp_path_factory.mktemp("scores")
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}/run")
    run_forked([*PYTHON, GPT, *TINY, *flags]).assert_ok()

    write_task(folder, "choice", CHOICE_YAML, count=41)
    write_task(folder, "likelihood", LIKELIHOOD_YAML, count=41)
    write_task(folder, "many", CHOICE_YAML, count=800)
    return Trained(folder / "run", folder / "tasks")


def eval_command(model: Path, tasks: Path, flags: str, processes: int = 1) -> list[str]:
    """Return the command that scores a model. ``flags`` begins with the names of tasks."""
    launcher = PYTHON
    if processes > 1:
        launcher = accelerate("cpu_ddp", "--num_processes", str(processes))
    words = shlex.split(f"-m llmtrain eval {model} --include_path {tasks} --tasks {flags}")
    return [*launcher, *words]


def request_counts(progress: str) -> list[int]:
    """Return the numbers of requests that the harness sent to the model, by its progress bars."""
    counts = re.findall(r"Running loglikelihood requests: +0%.* 0/(\d+)", progress)
    return [int(count) for count in counts]


# --- the oracle: the logits of transformers and peft


def load_model(folder: Path, vocabulary_size: int) -> torch.nn.Module:
    """Load a model, or an adapter with its base. A chat template may have added tokens to the base."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    base.resize_token_embeddings(vocabulary_size)
    return PeftModel.from_pretrained(base, folder).eval()


class Scores(NamedTuple):
    accuracy: float  # share of the questions whose right choice has the highest likelihood
    bits_per_byte: float  # of the questions as text


def scores_by_transformers(model_folder: Path, questions: list[dict[str, Any]]) -> Scores:
    """Score a model, one choice at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = load_model(model_folder, len(tokenizer))

    def log_likelihood(context: list[int], continuation: list[int]) -> float:
        token_ids = torch.tensor([context + continuation])
        with torch.no_grad():
            log_probabilities = model(token_ids).logits[0].log_softmax(-1)
        predictions = log_probabilities[len(context) - 1 : -1]
        return predictions.gather(-1, torch.tensor(continuation)[:, None]).sum().item()

    right_answers = 0
    nats = 0.0
    text_bytes = 0
    for question in questions:
        text = question["question"]
        context = tokenizer(text)["input_ids"]

        likelihoods = []
        for choice in question["choices"]:
            token_ids = tokenizer(f"{text} {choice}")["input_ids"]
            likelihoods.append(log_likelihood(context, token_ids[len(context) :]))
        right_answers += likelihoods.index(max(likelihoods)) == question["answer"]

        nats -= log_likelihood([tokenizer.bos_token_id], context)
        text_bytes += len(text.encode())

    return Scores(right_answers / len(questions), nats / math.log(2) / text_bytes)


# --- scores


@pytest.mark.timeout(400)
def test_scores_are_those_of_transformers_and_appear_in_the_report(trained: Trained) -> None:
    questions = trained.questions("choice")
    expected = scores_by_transformers(trained.run / "model", questions)
    assert trained.questions("likelihood") == questions
    assert 0.1 < expected.accuracy < 0.9, "neither always right nor always wrong"

    for processes in (1, 2):
        flags = "choice likelihood --json"
        command = eval_command(trained.run, trained.tasks, flags, processes)
        ended = run(command, timeout=180).assert_ok()

        scores = {line["task"]: line for line in json.loads(ended.out)}
        assert scores["choice"]["metric"] == "acc"
        assert scores["choice"]["questions"] == 41
        assert scores["choice"]["value"] == pytest.approx(expected.accuracy)
        assert scores["likelihood"]["value"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
        questions_of_first_rank = math.ceil(41 / processes)
        requests = CHOICES_PER_QUESTION * questions_of_first_rank
        assert requests in request_counts(ended.err)

    history = History.of_run(trained.run)
    assert [score["step"] for score in history.scores] == [6, 6, 6, 6]
    cells = r"<td>choice</td>\s*<td>acc</td>\s*<td class=\"number\">([\d.]+)</td>"
    accuracy = f"{expected.accuracy:.4f}"
    assert re.findall(cells, html([history])) == [accuracy, accuracy]


def test_the_report_shows_a_score_without_a_value(trained: Trained) -> None:
    history = History.of_run(trained.run)
    incomplete = {"step": 6}
    score = {
        "step": 6,
        "task": "choice",
        "metric": "acc",
        "value": None,
        "stderr": None,
        "questions": 41,
        "num_fewshot": 0,
        "model": "model",
        "time": 0.0,
    }

    page = html([history._replace(scores=[incomplete, score])])

    assert "<td>choice</td>" in page


def test_outside_a_repository_git_prints_nothing(trained: Trained, tmp_path: Path) -> None:
    command = eval_command(trained.run, trained.tasks, "choice")

    ended = wait(start_process(command, tree=tmp_path)).assert_ok()

    assert "acc" in ended.out
    assert "fatal" not in ended.err
    assert "repository" not in ended.err


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an adapter of a Llama with random weights, and return the run folder."""
    folder = tmp_path_factory.mktemp("adapter")
    chats = write_chats(folder / "chats.jsonl")
    base = folder / "base"
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **LLAMA)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    byte_tokenizer = tok.train_tokenizer("byte", [], lambda: iter(()))
    tok.as_pretrained(byte_tokenizer, 64).save_pretrained(base)

    flags = shlex.split(
        f"--model_name_or_path {base} --chat_template chatml --dataset {chats} --lora_r 4 "
        f"--learning_rate 0.05 --block_size 64 --output_dir {folder}/run"
    )
    run_forked([*PYTHON, FINETUNE, *SIX_STEPS, *flags]).assert_ok()
    return folder / "run"


def test_an_adapter_is_scored_with_its_base(trained: Trained, adapter_run: Path) -> None:
    checkpoint = adapter_run / "checkpoints" / "step-00000006"
    questions = trained.questions("likelihood")
    expected = scores_by_transformers(adapter_run / "model", questions)

    command = eval_command(checkpoint, trained.tasks, "likelihood --json")
    ended = run(command).assert_ok()

    [line] = json.loads(ended.out)
    assert line["value"] == pytest.approx(expected.bits_per_byte, rel=1e-4)
    assert find_fault(checkpoint) is None


@pytest.mark.parametrize(
    "command",
    [
        "export {checkpoint}",
        "export {checkpoint} --merge",
        "export {checkpoint}/model --to {tmp_path}/exported",
        "chat {checkpoint} --max_new_tokens 2",
        "generate {checkpoint} --prompt a --max_new_tokens 2",
        "replay {run} --step 6",
    ],
    ids=["export", "merge", "export elsewhere", "chat", "generate", "replay"],
)
def test_no_command_changes_the_checkpoint_that_it_reads(
    command: str, adapter_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = adapter_run / "checkpoints" / "step-00000006"
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))

    main(shlex.split(command.format(checkpoint=checkpoint, run=adapter_run, tmp_path=tmp_path)))

    assert find_fault(checkpoint) is None
    export = {
        "export {checkpoint}": adapter_run / "export-step-00000006",
        "export {checkpoint} --merge": adapter_run / "merged-step-00000006",
    }
    assert command not in export or export[command].is_dir()


# --- interruptions


def answers_in(folder: Path) -> int:
    """Count the answers that evaluations have kept in their databases."""
    answers = 0
    for path in folder.glob("*.db"):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(path)) as database,
        ):
            answers += database.execute("select count(*) from unnamed").fetchone()[0]
    return answers


@pytest.mark.timeout(400)
def test_a_killed_evaluation_continues_with_the_answers_it_has(
    trained: Trained, tmp_path: Path
) -> None:
    questions = trained.questions("many")
    requests = CHOICES_PER_QUESTION * len(questions)
    kept_answers = tmp_path / "answers"
    own_cache = {"LLMTRAIN_CACHE": str(tmp_path)}  # other tests leave answers in the shared one

    killed = start_process(
        eval_command(trained.run, trained.tasks, "many --batch_size 1"), own_cache
    )
    deadline = time.monotonic() + 120
    while answers_in(kept_answers) < 100:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stop_group(killed)
    answers_before = answers_in(kept_answers)
    assert 100 <= answers_before < requests, "killed in the middle"

    command = eval_command(trained.run, trained.tasks, "many --json")
    ended = run(command, own_cache, timeout=180).assert_ok()

    assert {*request_counts(ended.err)} == {requests - answers_before}
    expected = scores_by_transformers(trained.run / "model", questions)
    assert json.loads(ended.out)[0]["value"] == pytest.approx(expected.accuracy)
    assert list(kept_answers.glob("*.db")) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            "choices",
            r"--tasks: the harness has no 'choices' \(lm-eval ls tasks prints all\)",
            id="unknown task",
        ),
        pytest.param("choice --limit 0", "--limit 0 must be at least 1", id="no question"),
        pytest.param("choice --batch_size 0", "--batch_size 0 must be at least 1", id="no batch"),
        pytest.param("choice --apply_chat_template", "chat template", id="no chat template"),
        pytest.param("arc_easy", "HF_HUB_OFFLINE|hub cannot be reached", id="no data"),
    ],
)
def test_an_impossible_evaluation_is_an_error_of_one_line(
    flags: str, message: str, trained: Trained
) -> None:
    command = eval_command(trained.run, trained.tasks, flags)

    ended = run(command, {"HF_HUB_OFFLINE": "1"})

    assert ended.status == 2
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line
    assert "Traceback" not in ended.err
