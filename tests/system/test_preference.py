"""Preference training: whole runs of recipes/preference.py in real processes."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    SMALL_LLAMA,
    Ended,
    long_form,
    read_json,
    run,
    series,
    write_pairs,
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


# --- layouts

MICRO_BATCHES = "--global_batch_size 8 --per_device_train_batch_size 2"


def verify(how: str, flags: str, pairs: Path, recipe: str = PREFERENCE, planted: str = "") -> Ended:
    """Run `llmtrain verify` as ``how`` says, with further flags of the recipe."""
    run_flags = shlex.split(
        f"--from_config llama --chat_template chatml --block_size 64 --learning_rate 1e-2 "
        f"--dataset {pairs} {flags}"
    )
    command = [*PYTHON, "-m", "llmtrain", "verify", *shlex.split(how), recipe, *SMALL_LLAMA]
    return run([*command, *run_flags], {"PLANTED": planted}, timeout=400)


@long_form
@pytest.mark.parametrize("loss", ["kto", "ipo sft"])
def test_pairs_of_any_length_make_the_same_run_on_any_layout(loss: str, pairs: Path) -> None:
    how = "layout --layouts 1,2 --steps 3"
    verify(how, f"--loss_type {loss} {MICRO_BATCHES}", pairs).assert_ok()


@long_form
def test_a_bitwise_run_has_the_same_bits_on_any_layout(pairs: Path) -> None:
    how = "layout --layouts 4 --steps 3"
    flags = "--loss_type kto --bitwise --global_batch_size 8 --per_device_train_batch_size 1"
    ended = verify(how, flags, pairs).assert_ok()

    _, *rows, verdict = ended.out.splitlines()
    assert verdict.startswith("passed")
    hashes = {row.split()[-1] for row in rows}
    assert len(hashes) == 1


@long_form
def test_a_killed_run_with_a_baseline_resumes_with_the_same_bits(pairs: Path) -> None:
    verify("resume --steps 30 --layouts 2", "--loss_type kto", pairs).assert_ok()


@long_form
@pytest.mark.parametrize(
    ("bug", "loss", "message"),
    [
        (
            "a pair split over two processes",
            "sigmoid",
            "2 processes: different number of target tokens from step 1 on",
        ),
        ("a baseline of each process", "kto", "loss differs by"),
    ],
)
def test_verify_finds_a_planted_bug_and_names_its_effect(
    bug: str, loss: str, message: str, pairs: Path
) -> None:
    how = "layout --layouts 2 --steps 6"
    flags = f"--loss_type {loss} {MICRO_BATCHES}"
    ended = verify(how, flags, pairs, "tests/system/planted.py", planted=bug)

    assert ended.status == 1, ended.out + ended.err
    assert message in ended.out
    assert ended.out.splitlines()[-1] == "FAILED: not the same run"


# --- from text to preferences


@long_form
def test_each_recipe_continues_with_the_model_of_the_one_before(
    pairs: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    chats = tmp_path / "chats.jsonl"
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    chats.write_text(
        "".join(
            json.dumps({"prompt": record["prompt"], "completion": record["chosen"]}) + "\n"
            for record in records
        )
    )
    text = tmp_path / "text.txt"
    text.write_text("\n".join(re.findall(r'"[a-e]+"', pairs.read_text())) * 3)

    def train(recipe: str, flags: str) -> None:
        common = "--block_size 64 --eval_steps 20 --warmup_steps 5 --global_batch_size 8"
        run_forked([*PYTHON, recipe, *shlex.split(f"{common} {flags}")]).assert_ok()

    train(
        GPT,
        f"--architecture lfm2 --n_layer 2 --n_head 2 --n_embd 64 --tokenizer byte --max_steps 20 "
        f"--dataset {text} --output_dir {tmp_path}/gpt",
    )
    train(
        FINETUNE,
        f"--model_name_or_path {tmp_path}/gpt --chat_template chatml --learning_rate 3e-3 "
        f"--max_steps 40 --dataset {chats} --output_dir {tmp_path}/finetune",
    )
    train(
        PREFERENCE,
        f"--model_name_or_path {tmp_path}/finetune --learning_rate 3e-3 --eval_fraction 0.2 "
        f"--beta 0.3 --max_steps 40 --dataset {pairs} --output_dir {tmp_path}/preference",
    )

    folder = tmp_path / "preference"
    assert read_json(folder / "run.json")["task"] == "preferences"
    accuracies = series(folder, "eval/rewards/accuracies")
    losses = series(folder, "eval/loss")
    score(
        f"preferences: eval accuracy {accuracies[0]:.2f} before, {accuracies[40]:.2f} after 40 steps"
    )
    assert accuracies[40] > max(accuracies[0], 0.7)
    # At first, the model equals its reference, and the loss of DPO is log 2.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[40] < losses[0]
