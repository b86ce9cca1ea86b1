"""`llmtrain eval`: tasks of lm-evaluation-harness, on one process and on two, interrupted and gone on with."""

import contextlib
import json
import os
import re
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.record.history import History
from llmtrain.report.page import html
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    Ended,
    accelerate,
    begin,
    long_form,
    run,
    stop_group,
)

pytest.importorskip("lm_eval", reason="needs lm-eval, which comes with the extra dev")
pytestmark = long_form
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, Path]:
    """A run, and a folder with two tasks: of 25 questions, and of 800."""
    folder = tmp_path_factory.mktemp("scores")
    run_forked([*PYTHON, GPT, *TINY, "--dataset", str(text_file), "--output_dir", str(folder / "run")]).assert_ok()
    (folder / "tasks").mkdir()
    for name, count in (("few", 25), ("many", 800)):
        lines = [{"question": f"The token {i} reads", "choices": ["the", "xqz"], "answer": i % 2} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / f"{name}.jsonl"))
    return folder / "run", folder / "tasks"


def scored(trained: tuple[Path, Path], task: str, *flags: str, ranks: int = 1) -> list[str]:
    alone, together = [*PYTHON], accelerate("cpu_ddp", "--num_processes", str(ranks))
    words = ["-m", "llmtrain", "eval", str(trained[0]), "--tasks", task, "--include_path", str(trained[1]), *flags]
    return [*(alone if ranks == 1 else together), *words]


def by_hand(folder: Path, questions: Path) -> float:
    """The share of questions whose right choice is the likelier one."""
    model, right = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for line in map(json.loads, questions.read_text().splitlines()):
        sums = []
        for choice in line["choices"]:
            asked, whole = (tokenizer(text)["input_ids"] for text in (line["question"], f"{line['question']} {choice}"))
            with torch.no_grad():
                logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            sums.append(sum(float(logs[at - 1, whole[at]]) for at in range(len(asked), len(whole))))
        right.append(sums.index(max(sums)) == line["answer"])
    return sum(right) / len(right)


@pytest.mark.timeout(400)
def test_one_process_and_two_find_what_plain_logits_say_and_the_report_shows_it(trained) -> None:
    expected = by_hand(trained[0] / "model", trained[0].parent / "few.jsonl")
    assert expected == pytest.approx(13 / 25), "a model that prefers words that it knows is right where they are"
    for ranks in (1, 2):
        ended = run(scored(trained, "few", "--json", ranks=ranks), timeout=180).assert_ok()
        [line] = json.loads(ended.out)
        assert line["value"] == pytest.approx(expected)
        assert (line["task"], line["metric"], line["questions"]) == ("few", "acc", 25)
    history = History.of(trained[0])
    assert [one["value"] for one in history.scores] == pytest.approx([expected] * 2)
    assert [one["step"] for one in history.scores] == [6, 6]
    cells = re.findall(r"<td>few</td><td>acc</td><td class=\"number\">([\d.]+)</td>", html([history]))
    assert cells == [f"{expected:.4f}"] * 2


def kept(folder: Path) -> int:
    """How many answers an evaluation that was killed has kept."""
    total = 0
    for path in folder.glob("*.db"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as found:
            total += found.execute("select count(*) from unnamed").fetchone()[0]
    return total


@pytest.mark.timeout(400)
def test_an_evaluation_that_is_killed_asks_only_what_is_missing(trained) -> None:
    answers = Path(os.environ["LLMTRAIN_CACHE"]) / "answers"
    process = begin(scored(trained, "many", "--batch_size", "1"))
    until = time.monotonic() + 120
    while kept(answers) < 100:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    stop_group(process)
    before = kept(answers)
    assert 100 <= before < 1600, "killed in the middle"
    ended = run(scored(trained, "many", "--json"), timeout=180).assert_ok()
    [asked] = set(re.findall(r"Running loglikelihood requests: +0%.* 0/(\d+)", ended.err))
    assert int(asked) == 1600 - before
    assert json.loads(ended.out)[0]["value"] == pytest.approx(
        by_hand(trained[0] / "model", trained[0].parent / "many.jsonl")
    )
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
