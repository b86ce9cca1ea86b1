"""Preference training: whole runs of recipes/preference.py in real processes."""

import io
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.cli import main
from tests.launching import (
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    SMALL_LLAMA,
    long_form,
    read_json,
    run,
    series,
    write_pairs,
)

pytestmark = long_form

VERIFY = [*PYTHON, "-m", "llmtrain", "verify"]
VERIFIED_RUN = [
    *SMALL_LLAMA,
    *shlex.split("--from_config llama --chat_template chatml --block_size 64 --learning_rate 1e-2"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def verify_command(verify_flags: str, recipe: str, loss: str, pairs: Path) -> list[str]:
    """Return a command of `llmtrain verify`. ``loss`` is one name, or several to be added."""
    run_flags = shlex.split(f"--loss_type {loss} --dataset {pairs}")
    return [*VERIFY, *shlex.split(verify_flags), recipe, *VERIFIED_RUN, *run_flags]


# --- layouts
# A layout is the number of processes x micro-batches x pairs.


@pytest.mark.parametrize(
    ("loss", "layouts"),
    [
        ("kto", "1x1x8,2x2x2"),
        ("reward", "1x1x8,4x1x2"),
        ("ipo sft", "1x1x8,1x4x2,2x2x2"),
    ],
)
def test_pairs_of_any_length_make_the_same_run_on_any_layout(
    loss: str, layouts: str, pairs: Path
) -> None:
    command = verify_command(f"layout --layouts {layouts} --steps 3", PREFERENCE, loss, pairs)
    ended = run(command, timeout=400).assert_ok()
    assert "passed: the same run" in ended.out


@pytest.mark.parametrize(
    ("loss", "layouts"),
    [
        ("sigmoid", "1x8x1,2x4x1,4x2x1"),
        ("kto", "1x8x1,2x4x1"),
        ("sft", "1x8x1,2x4x1"),
    ],
)
def test_a_bitwise_run_has_the_same_bits_on_any_layout(
    loss: str, layouts: str, pairs: Path
) -> None:
    command = verify_command(f"layout --layouts {layouts} --steps 3", PREFERENCE, loss, pairs)
    ended = run([*command, "--bitwise"], timeout=400).assert_ok()

    assert "passed: the same run" in ended.out
    _, *rows, _ = ended.out.splitlines()
    hashes = {row.split()[-1] for row in rows}
    assert len(hashes) == 1


def test_a_killed_run_with_a_baseline_resumes_with_the_same_bits(pairs: Path) -> None:
    command = verify_command("resume --steps 30 --layouts 2", PREFERENCE, "kto", pairs)
    ended = run(command, timeout=400).assert_ok()
    assert "passed: the same run" in ended.out


@pytest.mark.parametrize(
    ("bug", "loss", "message"),
    [
        ("a mean of ranks' means of pairs", "sigmoid", "gradient norm differs by"),
        (
            "a pair split over two processes",
            "sigmoid",
            "2x2x2: different number of target tokens from step 1 on",
        ),
        ("a baseline of each process", "kto", "loss differs by"),
    ],
)
def test_verify_finds_a_planted_bug_and_names_its_effect(
    bug: str, loss: str, message: str, pairs: Path
) -> None:
    command = verify_command(
        "layout --layouts 1x1x8,2x2x2 --steps 6", "tests/system/planted.py", loss, pairs
    )

    ended = run(command, env={"PLANTED": bug}, timeout=200)

    assert ended.status == 1, ended.out + ended.err
    assert message in ended.out
    assert ended.out.splitlines()[-1] == "FAILED: not the same run"


# --- from text to a chat


@pytest.mark.timeout(900)
def test_each_recipe_continues_with_the_model_of_the_one_before(
    pairs: Path,
    tmp_path: Path,
    score: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = []
    for line in pairs.read_text().splitlines():
        pair = json.loads(line)
        # The recipe reads no column of the name "not".
        chat = {
            "prompt": pair["prompt"],
            "completion": pair["chosen"],
            "not": pair["rejected"],
        }
        lines.append(json.dumps(chat) + "\n")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(lines))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(re.findall(r'"[a-e]+"', pairs.read_text())) * 3)
    common = (
        "--block_size 64 --eval_steps 20 --warmup_steps 5 --global_batch_size 8 --report_to none"
    )

    def train(recipe: str, flags: str) -> None:
        run([*PYTHON, recipe, *shlex.split(f"{common} {flags}")], timeout=280).assert_ok()

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
    # Without a model, the recipe takes the fine-tuning run beside its own folder.
    train(
        PREFERENCE,
        f"--learning_rate 3e-3 --eval_fraction 0.2 --beta 0.3 --max_steps 40 --dataset {pairs} "
        f"--output_dir {tmp_path}/preference",
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

    monkeypatch.setattr("sys.stdin", io.StringIO("abce\n"))
    capsys.readouterr()
    main(shlex.split(f"chat {folder} --temperature 0 --max_new_tokens 12 --json"))
    assert json.loads(capsys.readouterr().out)["content"]
