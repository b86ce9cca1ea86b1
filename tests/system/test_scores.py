"""`llmtrain eval`: tasks of lm-evaluation-harness, on one process and on two, interrupted and gone on with."""

import contextlib
import io
import json
import math
import random
import re
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.lab.report.page import html
from llmtrain.models.generation import TextModel
from llmtrain.record.checkpoint import find_fault
from llmtrain.record.history import History
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    TINY,
    Ended,
    accelerate,
    begin,
    long_form,
    run,
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
    "vocab_size": 257,
}
LLAMA |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WHOLE = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


def write_task(folder: Path, name: str, kind: str, count: int) -> None:
    draw = random.Random(count)
    words = ["model", "token", "batch", "kernel", "weight", "bucket", "zxq", "1234", "the", "and"]
    lines = [
        {
            "question": f"The {draw.choice(words)} {i}",
            "choices": draw.sample(words, 3),
            "answer": draw.randrange(3),
        }
        for i in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"{name}.yaml").write_text(
        HEAD.format(name=name, data=folder / f"{name}.jsonl") + kind
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, Path]:
    """A run, and a folder with tasks: of 41 questions, of 41 texts, and of 800 questions."""
    folder = tmp_path_factory.mktemp("scores")
    run_forked(
        [*PYTHON, GPT, *TINY, "--dataset", str(text_file), "--output_dir", str(folder / "run")]
    ).assert_ok()
    for name, kind, count in (("few", CHOICE, 41), ("whole", WHOLE, 41), ("many", CHOICE, 800)):
        write_task(folder, name, kind, count)
    return folder / "run", folder / "tasks"


def scored(trained: tuple[Path, Path], *words: str, ranks: int = 1) -> list[str]:
    alone, together = [*PYTHON], accelerate("cpu_ddp", "--num_processes", str(ranks))
    words = (
        "-m",
        "llmtrain",
        "eval",
        str(trained[0]),
        "--include_path",
        str(trained[1]),
        "--tasks",
        *words,
    )
    return [*(alone if ranks == 1 else together), *words]


def by_hand(run_folder: Path, questions: Path) -> tuple[float, float]:
    """The share of questions whose right choice is the likeliest, and the bits for a byte of the questions."""
    text, right, bits, size = TextModel(str(run_folder / "model")), [], 0.0, 0

    def likelihood(before: list[int], after: list[int]) -> float:
        with torch.no_grad():
            logs = text.model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        return sum(
            float(logs[at - 1, (before + after)[at]])
            for at in range(len(before), len(before + after))
        )

    for line in map(json.loads, questions.read_text().splitlines()):
        asked = text.tokenizer(line["question"])["input_ids"]
        wholes = [
            text.tokenizer(f"{line['question']} {choice}")["input_ids"]
            for choice in line["choices"]
        ]
        found = [likelihood(asked, whole[len(asked) :]) for whole in wholes]
        right.append(found.index(max(found)) == line["answer"])
        bits -= likelihood([text.tokenizer.bos_token_id], asked) / math.log(2)
        size += len(line["question"].encode())
    return sum(right) / len(right), bits / size


@pytest.mark.timeout(400)
def test_one_process_and_two_find_what_plain_logits_say_and_the_report_shows_it(trained) -> None:
    share, bits = by_hand(trained[0], trained[0].parent / "few.jsonl")
    same, expected = by_hand(trained[0], trained[0].parent / "whole.jsonl")
    assert share == same, "the same questions"
    for ranks in (1, 2):
        ended = run(scored(trained, "few", "whole", "--json", ranks=ranks), timeout=180).assert_ok()
        found = {line["task"]: line for line in json.loads(ended.out)}
        asked = re.findall(
            r"Running loglikelihood requests: +0%.* 0/(\d+)", ended.err
        )  # by the first rank
        assert str(3 * -(-41 // ranks)) in asked
        assert found["few"]["value"] == pytest.approx(share)
        assert found["whole"]["value"] == pytest.approx(expected, rel=1e-5)
        assert (found["few"]["metric"], found["few"]["questions"]) == ("acc", 41)
    assert 0.1 < share < 0.9
    assert bits == expected
    history = History.of_run(trained[0])
    assert [one["step"] for one in history.scores] == [6] * 4
    cells = re.findall(
        r"<td>few</td>\s*<td>acc</td>\s*<td class=\"number\">([\d.]+)</td>", html([history])
    )
    assert cells == [f"{share:.4f}"] * 2
    torn = history._replace(
        scores=[{"step": 6}, {**history.scores[0], "value": None, "stderr": None}]
    )
    assert "<td>few</td>" in html([torn])


def test_outside_a_repository_git_prints_nothing(trained, tmp_path: Path) -> None:
    scores = wait(begin(scored(trained, "few"), tree=tmp_path)).assert_ok()
    assert "acc" in scores.out
    assert "fatal" not in scores.err
    assert "repository" not in scores.err


def test_an_adapter_is_scored_with_its_base_and_no_command_changes_its_checkpoint(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    config = AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64).save_pretrained(
        tmp_path / "base"
    )
    flags = [
        "--model_name_or_path",
        str(tmp_path / "base"),
        "--chat_template",
        "chatml",
        "--dataset",
        str(chats),
    ]
    flags += ["--lora_r", "4", "--learning_rate", "0.05", "--block_size", "64", *TINY[10:]]
    run_forked([*PYTHON, FINETUNE, *flags, "--output_dir", str(tmp_path / "run")]).assert_ok()
    _, expected = by_hand(tmp_path / "run", trained[0].parent / "whole.jsonl")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000006"
    ended = run(scored((checkpoint, trained[1]), "whole", "--json")).assert_ok()
    [line] = json.loads(ended.out)
    assert line["value"] == pytest.approx(expected, rel=1e-4)
    assert find_fault(checkpoint) is None, "eval"

    name = str(checkpoint)
    for command in (
        ["export", name],
        ["export", name, "--merge"],
        ["export", str(checkpoint / "model"), "--to", str(tmp_path / "to")],
        ["chat", name, "--max_new_tokens", "2"],
        ["generate", name, "--prompt", "a", "--max_new_tokens", "2"],
        ["replay", str(tmp_path / "run"), "--step", "6"],
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
        main(command)
        assert find_fault(checkpoint) is None, command
    for folder in ("export-step-00000006", "merged-step-00000006"):
        assert (tmp_path / "run" / folder).is_dir()


def kept(folder: Path) -> int:
    """How many answers an evaluation that was killed has kept."""
    total = 0
    for path in folder.glob("*.db"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as found:
            total += found.execute("select count(*) from unnamed").fetchone()[0]
    return total


@pytest.mark.timeout(400)
def test_an_evaluation_that_is_killed_asks_only_what_is_missing(trained, tmp_path: Path) -> None:
    answers, own = (
        tmp_path / "answers",
        {"LLMTRAIN_CACHE": str(tmp_path)},
    )  # others end in errors and leave theirs
    process = begin(scored(trained, "many", "--batch_size", "1"), own)
    until = time.monotonic() + 120
    while kept(answers) < 100:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    stop_group(process)
    before = kept(answers)
    assert 100 <= before < 2400, "killed in the middle"
    ended = run(scored(trained, "many", "--json"), own, timeout=180).assert_ok()
    [asked] = set(re.findall(r"Running loglikelihood requests: +0%.* 0/(\d+)", ended.err))
    assert int(asked) == 2400 - before
    share, _ = by_hand(trained[0], trained[0].parent / "many.jsonl")
    assert json.loads(ended.out)[0]["value"] == pytest.approx(share)
    assert not list(answers.glob("*.db"))


@pytest.mark.parametrize(
    ("task", "flags", "says"),
    [
        ("fewer", [], r"--tasks: the harness has no 'fewer' \(lm-eval ls tasks prints all\)"),
        ("few", ["--limit", "0"], "--limit 0 must be at least 1"),
        ("few", ["--batch_size", "0"], "--batch_size 0 must be at least 1"),
        ("few", ["--apply_chat_template"], "chat template"),
        ("arc_easy", [], "HF_HUB_OFFLINE|hub cannot be reached"),
    ],
)
def test_what_cannot_be_scored_is_one_line(trained, task: str, flags: list[str], says: str) -> None:
    ended: Ended = run(scored(trained, task, *flags), {"HF_HUB_OFFLINE": "1"})
    assert ended.status == 2
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert re.search(says, line), line
    assert "Traceback" not in ended.err
