"""A flag of another program is answered with the flag to use here, and a misspelled one with the nearest."""

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
        ("preference --use_peft", "--lora_r 16"),
        ("gpt --optim ADAMW_torch", "adamw"),
    ],
)
def test_a_flag_or_a_value_of_another_program_is_answered_with_a_hint(
    command: str, hint: str
) -> None:
    recipe, flag, *value = command.split()

    message = error_of(recipe, " ".join([flag, *value]))

    assert message.startswith(f"{flag}: " if value else f"unknown flag {flag}: ")
    assert hint in message
    assert "did you mean" not in message


def test_a_flag_and_its_other_name_cannot_both_be_set(tmp_path: Path) -> None:
    path = tmp_path / "lengths.yaml"
    path.write_text("max_length: 64\nblock_size: 128\n")

    for flags in ("--max_length 64 --block-size=128", f"--config {path}"):
        assert "--block_size is another name of --max_length" in error_of("finetune", flags)


def test_each_hint_is_printed_and_names_only_flags_of_the_recipe_that_prints_it() -> None:
    """No hint is for a flag that is gone, and none has a value that its flag takes."""
    printed = set()
    for recipe, defaults in RECIPES.items():
        parser = recipe_parser(configs_of(defaults))
        flags = set(parser._option_string_actions)
        for name in hints("recipes"):
            flag, _, value = name.partition("=")
            if (f"--{flag}" in flags) != bool(value) or not hint_for(name, flags):
                continue  # A hint for a value needs the flag, and one for a flag that it is unknown.
            message = error_of(recipe, f"--{flag} {value}")
            hint = message.partition("(choose from ")[2].partition("): ")[2] if value else message
            own_words = re.sub(r"accelerate launch .* RECIPE|unknown flag \S+", "", hint)
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
        ("hlep", "help"),
    ],
)
def test_a_misspelled_flag_gets_the_nearest_flag_of_the_recipe(typo: str, flag: str) -> None:
    assert f"unknown flag --{typo} - did you mean --{flag}?" in error_of("finetune", f"--{typo}")
