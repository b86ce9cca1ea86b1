"""Distillation: whole runs of recipes/distill.py, with a teacher beside the student."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from llmtrain.data import tokenizer as tok
from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import (
    PYTHON,
    SMALL_LLAMA,
    Ended,
    accelerate,
    long_form,
    read_json,
    run,
    series,
    torchrun,
    write_chats,
)
from tests.models.small_models import byte_tokenizer

DISTILL = "recipes/distill.py"
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make teachers that are larger than the students. One has dropout, and rows of padding."""
    folder = tmp_path_factory.mktemp("teachers")
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"vocab_size": 259, "tie_word_embeddings": False},
        "gemma2": {"vocab_size": 264, "final_logit_softcapping": 2.0, "attention_dropout": 0.5},
    }
    tokenizer = byte_tokenizer()
    tok.set_template(tokenizer, "chatml")
    for name, values in kinds.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **values))
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def flags_of(teacher: Path, chats: Path, further: str = "") -> list[str]:
    flags = (
        f"--tokenizer {teacher} --teacher_model_name_or_path {teacher} --dataset {chats} "
        f"--block_size 96 --learning_rate 1e-2 {further}"
    )
    return [*SMALL_LLAMA, *shlex.split(flags)]


def verify(how: str, flags: list[str]) -> Ended:
    command = [*PYTHON, "-m", "llmtrain", "verify", *shlex.split(how), DISTILL]
    return run([*command, "--from_config", "llama", *flags], timeout=400).assert_ok()


@pytest.mark.parametrize(
    ("launcher", "teacher", "further", "tolerance"),
    [
        (accelerate("fsdp2"), "gemma2", "", 1e-5),
        pytest.param(torchrun(2), "llama", "--beta 0.5", 1e-5, marks=long_form, id="DDP"),
        pytest.param(
            accelerate("fsdp2"), "llama", "--mixed_precision bf16", 5e-3, marks=long_form, id="bf16"
        ),
    ],
)
def test_a_sharded_teacher_teaches_what_a_whole_one_does(
    launcher: list[str],
    teacher: str,
    further: str,
    tolerance: float,
    teachers: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    flags = flags_of(teachers / teacher, chats, further)
    losses = []
    for number, command in enumerate([PYTHON, launcher]):
        folder = tmp_path / str(number)
        output = ["--output_dir", str(folder)]
        run_forked([*command, DISTILL, "--from_config", "llama", *flags, *output]).assert_ok()
        losses.append([*series(folder, "train/loss").values()])

    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert losses[0][-1] < 0.8 * losses[0][0], "the student learns"
    # The teacher is in no checkpoint, and in the fingerprint.
    [saved] = folder.glob("checkpoints/step-*/model")
    assert {name for name, _ in read_tensors(saved)} == {
        name for name, _ in read_tensors(folder / "model")
    }
    fingerprint = read_json(folder / "run.json")["fingerprint"]
    assert [*fingerprint["frozen"]] == ["teacher"]
    assert fingerprint["objective"]["beta"] == (0.5 if "beta" in further else 0)


@long_form
def test_a_bitwise_distillation_has_the_same_bits_on_any_layout(
    teachers: Path, chats: Path
) -> None:
    flags = flags_of(teachers / "llama", chats, "--bitwise --sft_share 0.5")
    ended = verify("layout --layouts 2,4 --steps 3", flags)

    _, *rows, verdict = [line.split() for line in ended.out.splitlines()]
    assert verdict[0] == "passed:"
    assert len({row[-1] for row in rows}) == 1


@long_form
def test_a_killed_distillation_resumes_with_the_same_bits(teachers: Path, chats: Path) -> None:
    ended = verify("resume --steps 30 --layouts 2", flags_of(teachers / "gemma2", chats))
    assert "passed: the same run" in ended.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "name a teacher with --teacher_model_name_or_path"),
        ("--teacher_model_name_or_path {other}", "has another vocabulary than the rows: token 257"),
        ("--teacher_model_name_or_path {reward}", "/reward gives no logits"),
        ("--teacher_model_name_or_path {empty}", "lm_head.weight is missing"),
        ("--teacher_model_name_or_path {absent}", "--teacher_model_name_or_path"),
        ("--teacher_model_name_or_path {llama} --beta 2", "--beta 2"),
    ],
)
def test_a_wrong_teacher_is_one_line(
    flags: str, message: str, teachers: Path, chats: Path, tmp_path: Path
) -> None:
    llama = teachers / "llama"
    places = {name: tmp_path / name for name in ("other", "reward", "empty")}
    for place in places.values():
        shutil.copytree(llama, place)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(places["other"])
    reward_model = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
    reward_model.save_pretrained(places["reward"])
    (places["empty"] / "model.safetensors").unlink()

    command = [
        *PYTHON, DISTILL, "--from_config", "llama", *SMALL_LLAMA,
        "--tokenizer", str(llama), "--dataset", str(chats), "--block_size", "96",
        *shlex.split(flags.format(llama=llama, absent=tmp_path / "absent", **places)),
    ]  # fmt: skip
    ended = run_forked([*command, "--output_dir", str(tmp_path / "run")])

    assert ended.status == 2, ended.out + ended.err
    *_, line = ended.err.strip().splitlines()
    assert message in line
    assert line.startswith("error: ")
    assert "Traceback" not in ended.err
