"""Distillation in rounds: who answered, with which weights, and what a kill leaves of a round."""

import json
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.data.tokenized import Tokenized
from llmtrain.storage import Storage
from tests.buckets import bucket_server
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, Ended, accelerate, metrics, read_json, torchrun
from tests.record.checkpoint_files import tensors_digest

RECIPE = "tests/system/interrupted_distill.py"
PROMPTS = 20  # three groups, the last of which is smaller
STEPS = 3  # of a round
FLAGS = shlex.split(
    "--config_overrides hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8 "
    "--max_length 64 --eval_fraction 0.1 --global_batch_size 8 --per_device_train_batch_size 2 "
    "--threads 1 --report_to none --logging_steps 1 --save_steps 100"
)
ROUNDS = shlex.split(
    f"--rounds 3 --prompts_per_round {PROMPTS} --max_new_tokens 12 --log_rows --save_total_limit 9"
)
LAST = f"checkpoints/step-{3 * STEPS:08}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one or two turns."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(28):
            messages = []
            for turn in range(1 + number % 2):
                messages.append({"role": "user", "content": f"{number}+{turn}?"})
                messages.append({"role": "assistant", "content": f"{number + turn}"})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def teacher(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    flags = ["--tokenizer", "byte", "--max_steps", "8", "--dataset", str(chats)]
    run_forked([*PYTHON, FINETUNE, *FLAGS, *flags, "--output_dir", str(folder)]).assert_ok()
    return folder / "model"


@pytest.fixture(scope="module")
def flags(chats: Path, teacher: Path) -> list[str]:
    data = ["--dataset", str(chats), "--tokenizer", str(teacher)]
    return [*FLAGS, *data, "--teacher_model_name_or_path", str(teacher)]


@pytest.fixture(scope="module")
def undisturbed(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bitwise run of one process."""
    return distill(PYTHON, [*flags, *ROUNDS, "--bitwise"], tmp_path_factory.mktemp("whole") / "run")


def distill(launcher: list[str], flags: list[str], folder: Path) -> Path:
    env = {"MARKS": str(folder.parent / "marks")}
    run_forked([*launcher, RECIPE, *flags, "--output_dir", str(folder)], env).assert_ok()
    return folder


def round_rows(folder: Path, number: int) -> dict[str, np.ndarray]:
    rows = Tokenized.open(folder / "rounds" / f"round-{number:04}", check=True).train
    return rows.read(np.arange(len(rows)))


def logps_of(model_folder: Path, rows: dict[str, np.ndarray]) -> torch.Tensor:
    """Return the log-probabilities of the answers, [rows, T], as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    ids = torch.from_numpy(rows["input_ids"]).long()
    with torch.no_grad():
        logps = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logps, (1, 0)) * torch.from_numpy(rows["labels"] != -100)


def test_a_round_is_a_set_of_the_students_answers_scored_with_the_weights_at_its_beginning(
    undisturbed: Path, teacher: Path, chats: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = []
    questions = set()
    for number in (2, 3):  # no checkpoint has the weights of the first one
        rows = round_rows(undisturbed, number)
        student = undisturbed / f"checkpoints/step-{(number - 1) * STEPS:08}/model"
        for name, folder in [("student_logp", student), ("teacher_logp", teacher)]:
            scores = torch.from_numpy(rows[name])
            assert torch.allclose(scores, logps_of(folder, rows), atol=2e-5)
            assert scores.count_nonzero() == (rows["labels"] != -100).sum()
    for number in (1, 2, 3):
        rows = round_rows(undisturbed, number)
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            prompts.append(tuple(ids[: np.flatnonzero(labels != -100)[0]]))
    # The 25 training rows come once before any comes again.
    assert len({*prompts[:25]}) == len({*prompts[25:50]}) == 25
    assert {*prompts[:25]} == {*prompts[25:50]}
    assert prompts[:25] != prompts[25:50]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    for line in chats.read_text().splitlines():
        question = json.loads(line)["messages"][:-1]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
        questions.add(tuple(ids))
    assert {*prompts} < questions

    entries = metrics(undisturbed)
    logged = [entry["round/reverse_kl"] for entry in entries if "round/answers" in entry]
    rows = round_rows(undisturbed, 3)
    is_target = rows["labels"] != -100
    gap = (rows["student_logp"] - rows["teacher_logp"])[is_target].mean()
    assert logged[2:] == [pytest.approx(gap, abs=1e-6)]
    # The student that answered is the one that learns, until a step changes it.
    distances = [entry["train/kl_to_sampler"] for entry in entries if "train/loss" in entry]
    assert np.abs(distances[::STEPS]).max() < 1e-6
    assert np.abs(distances[1::STEPS]).min() > 1e-5

    lines = [json.loads(line) for line in (undisturbed / "rows.jsonl").read_text().splitlines()]
    for number in range(3):
        steps = lines[number * STEPS : (number + 1) * STEPS]
        rows_of_round = [row for line in steps for row in line["rows"] if row >= 0]
        assert sorted(rows_of_round) == [*range(PROMPTS)]
    _, out, _ = run_cli(capsys, "rows", str(undisturbed), "--step", "5")
    assert "step 5 had these rows" in out


def test_answers_are_the_same_on_shards_and_replicas(
    flags: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    for launcher in (accelerate("fsdp2"), torchrun(2)):
        folder = distill(launcher, [*flags, *ROUNDS], tmp_path / Path(launcher[-1]).stem / "run")
        for number in (1, 2, 3):
            rows = round_rows(folder, number)
            for name, expected in round_rows(undisturbed, number).items():
                np.testing.assert_allclose(rows[name], expected, atol=1e-3 * (name[-1] == "p"))


def test_a_run_that_is_killed_anywhere_in_its_rounds_ends_with_the_same_bits(
    flags: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """Starts on one and two processes take turns, as a bitwise run may."""
    folder = tmp_path / "run"
    marks = tmp_path / "marks"

    def start(launcher: list[str], *moment: Any) -> Ended:
        env = {"MARKS": str(marks)}
        if moment:
            names = ("name", "count", "rank", "signal")
            env["MOMENT"] = json.dumps(dict(zip(names, moment, strict=True)))
        command = [*launcher, RECIPE, *flags, *ROUNDS, "--bitwise", "--output_dir", str(folder)]
        return run_forked(command, env)

    def groups(number: int) -> int:
        return len([*folder.glob(f"rounds/round-{number:04}/group-*")])

    start(PYTHON, "answer", 2, 0, signal.SIGKILL)
    assert groups(1) == 1
    ended = start(torchrun(2), "answer", 1, 1, signal.SIGTERM).assert_ok()
    assert groups(1) == 3
    assert "stopped" in ended.out
    assert read_json(folder / "status.json")["state"] == "preempted"
    start(PYTHON, "make", 1, 0, signal.SIGKILL)
    assert groups(1) == 3
    start(torchrun(2), "finish", 1, 0, signal.SIGKILL)
    assert read_json(folder / "status.json")["step"] == 0
    start(PYTHON, "train_step", 1, 0, signal.SIGTERM)
    assert read_json(folder / "status.json")["step"] == 2

    shard = folder / "rounds/round-0001/train-0-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = start(PYTHON)
    assert ended.status == 2
    assert f"{shard.parent} cannot be used: {shard.name} differs from its hash" in ended.err
    shutil.move(shard.parent, tmp_path / "elsewhere")
    ended = start(torchrun(2))
    assert ended.status == 2
    assert f"{shard.parent} cannot be used: No such file" in ended.err
    shutil.move(tmp_path / "elsewhere", shard.parent)
    shard.write_bytes(content)

    start(PYTHON, "write_sealed", 2, 0, signal.SIGKILL)
    assert (folder / f"checkpoints/step-{STEPS:08}").exists()  # although --save_steps is 100
    assert groups(2) == 2
    start(torchrun(2)).assert_ok()

    assert tensors_digest(folder / LAST) == tensors_digest(undisturbed / LAST)
    assert (folder / "rows.jsonl").read_text() == (undisturbed / "rows.jsonl").read_text()
    written = marks.read_text().split()
    assert len(written) == len({*written}) == 9
    assert not [*folder.glob("rounds/*/group-*")]


def test_a_run_that_is_stopped_in_a_round_goes_on_elsewhere_and_from_its_mirror(
    flags: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    stop = {"name": "train_step", "count": 4, "rank": 0, "signal": signal.SIGTERM}
    env = {"MARKS": str(tmp_path / "marks"), "MOMENT": json.dumps(stop)}
    command = [*PYTHON, RECIPE, *flags, *ROUNDS, "--bitwise", "--output_dir"]
    with bucket_server():
        mirror = "s3://bucket/rounds"
        run_forked([*command, str(tmp_path / "lost"), "--mirror", mirror], env)
        assert read_json(tmp_path / "lost/status.json")["step"] == 5
        checkpoint = str(tmp_path / "lost/checkpoints/step-00000005")
        extending = [*command, str(tmp_path / "other"), "--resume_from_checkpoint", checkpoint]
        run_forked(extending, {"MARKS": env["MARKS"]}).assert_ok()
        shutil.rmtree(tmp_path / "lost")
        assert not [name for name in Storage(mirror).sizes("rounds") if "group" in name]

        resumed = tmp_path / "resumed"
        resuming = [*command, str(resumed), "--resume_from_checkpoint", mirror]
        run_forked(resuming, {"MARKS": env["MARKS"]}).assert_ok()
    for folder in (tmp_path / "other", resumed):
        assert tensors_digest(folder / LAST) == tensors_digest(undisturbed / LAST)
    # Each group of two rounds once, and those of the last round in both runs.
    assert len((tmp_path / "marks").read_text().split()) == 6 + 3 + 3
