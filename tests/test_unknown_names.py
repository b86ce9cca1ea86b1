"""A flag of another program is answered with the flag to use here, and a misspelled one with the nearest."""

import dataclasses
import pydoc
import re
import runpy
import shlex
from pathlib import Path

import pytest

from llmtrain.config.command_line import parse, recipe_parser
from llmtrain.config.flags import configs_of
from llmtrain.config.parser import hint_for, hints
from llmtrain.errors import UserError
from tests.launching import ROOT

RECIPES = {
    name: runpy.run_path(str(ROOT / "recipes" / f"{name}.py"))["DEFAULTS"]
    for name in ("gpt", "finetune", "preference")
}


def error_of(recipe: str, flags: str) -> str:
    """Return the error of a recipe, of one line."""
    with pytest.raises(UserError) as caught:
        parse(RECIPES[recipe], shlex.split(flags))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("finetune --lr", "--learning_rate"),
        ("gpt --max_iters", "--max_steps"),
        ("gpt --model_name_or_path", "recipes/finetune.py"),
        ("preference --use_peft", "--lora_r N"),
        ("gpt --optim ADAMW_torch", "adamw"),
        ("finetune --optim adamw_8bit", "adamw_torch_8bit"),
        ("gpt --lr_scheduler_type cosine_with_restarts", "docs/guides/optimizers.md"),
        ("preference --loss_type grpo", "TRL has it"),
        ('preference --loss_type ["sigmoid","sft"]', "spaces"),
        ("finetune --quantization_bit", "--load_in_4bit"),
        ("finetune --packing_strategy", "leave it out"),
    ],
)
def test_a_flag_or_a_value_of_another_program_is_answered_with_a_hint(
    command: str, hint: str
) -> None:
    recipe, flag, *value = command.split()

    message = error_of(recipe, shlex.join([flag, *value]))

    assert message.startswith(f"{flag} {value[0]}: " if value else f"unknown flag {flag}: ")
    assert hint in message
    assert "did you mean" not in message


def test_a_hint_has_the_value_that_the_user_wrote(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text("datasets:\n  - path: a.jsonl\n    type: chat\nlr: 5.0e-6\n")

    message = error_of("finetune", "--warmup_ratio 0.03 --cutoff_len=512 --lora_rank")
    message_of_file = error_of("finetune", f"--config {path}")

    for hint in ("--warmup_steps 0.03;", "--max_length 512;", "--lora_r VALUE"):
        assert hint in message
    assert "--datasets: use --dataset" in message_of_file
    assert "--learning_rate 5.0e-6;" in message_of_file


def test_a_flag_and_its_other_name_cannot_both_be_set(tmp_path: Path) -> None:
    path = tmp_path / "lengths.yaml"
    path.write_text("max_length: 64\nblock_size: 128\n")

    for flags in ("--max_length 64 --block-size=128", f"--config {path}"):
        assert "--block_size is another name of --max_length" in error_of("finetune", flags)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("gpt", "transformers.TrainingArguments"),
        ("finetune", "transformers.Seq2SeqTrainingArguments trl.SFTConfig trl.ModelConfig"),
        ("finetune", "trl.ScriptArguments trl.scripts.utils.DatasetMixtureConfig"),
        ("finetune", "trl.DistillationConfig trl.GRPOConfig trl.RLOOConfig"),
        ("preference", "trl.DPOConfig trl.KTOConfig trl.RewardConfig trl.ModelConfig"),
        ("preference", "trl.experimental.orpo.ORPOConfig trl.experimental.cpo.CPOConfig"),
    ],
)
def test_each_name_of_transformers_and_trl_is_a_flag_or_has_a_hint(
    recipe: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", "1.16")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    flags = set(recipe_parser(configs_of(RECIPES[recipe]))._option_string_actions)
    fields: set[str] = set()
    for name in names.split():
        fields |= {field.name for field in dataclasses.fields(pydoc.locate(name))}

    unknown = {f"--{name}" for name in fields} - flags
    without_hint = {flag for flag in unknown if not hint_for(flag, flags)}

    assert len(unknown) > 2
    assert without_hint == set()


def test_each_hint_is_printed_and_names_only_flags_of_the_recipe_that_prints_it() -> None:
    """No hint is for a flag that is gone, and none has a value that its flag takes."""
    printed = set()
    for recipe, defaults in RECIPES.items():
        parser = recipe_parser(configs_of(defaults))
        flags = set(parser._option_string_actions)
        for name, hint in hints("recipes").items():
            flag, _, value = name.partition("=")
            if (f"--{flag}" in flags) != bool(value):
                continue  # A hint for a value needs the flag, and one for a flag that it is unknown.
            if hint_for(name, None if value else flags) != hint:
                continue
            message = error_of(recipe, shlex.join([f"--{flag}", value or "VALUE"]))
            assert hint in message
            own_words = re.sub(r"accelerate launch .* RECIPE", "", hint)
            assert set(re.findall(r"--\w+", own_words)) <= flags, message
            printed.add(name)

    assert printed == set(hints("recipes"))


@pytest.mark.parametrize(
    ("typo", "flag"),
    [
        ("learnign_rtae", "learning_rate"),
        ("maxsteps", "max_steps"),
        ("load_4bit", "load_in_4bit"),
        ("data", "dataset"),
        ("log_row", "log_rows"),
        ("hlep", "help"),
    ],
)
def test_a_misspelled_flag_gets_the_nearest_flag_of_the_recipe(typo: str, flag: str) -> None:
    assert f"unknown flag --{typo} - did you mean --{flag}?" in error_of("finetune", f"--{typo}")


def test_a_name_that_is_not_near_a_flag_gets_none() -> None:
    assert error_of("finetune", "--cp_size 2") == "unknown flag --cp_size; --help lists the flags."
