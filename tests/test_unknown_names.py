"""A flag of another program is answered with the flag to use here, and the recipe has that flag."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from llmtrain.cli import build_parser
from llmtrain.config.command_line import parse
from llmtrain.config.flag_parser import FlagParser
from llmtrain.config.flags import configs_of
from llmtrain.config.unknown_names import did_you_mean, hint_for, hints
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


# Flags and values of other programs for a recipe, with a part of the hint.
HINTS = {
    # Of every program, and of nanoGPT.
    "finetune --lr": "use --learning_rate",
    "finetune --epochs": "use --num_train_epochs",
    "finetune --bf16": "accelerate launch --mixed_precision bf16",
    "gpt --batch_size": "use --global_batch_size",
    "gpt --max_iters": "use --max_steps",
    "gpt --eval_interval": "use --eval_steps",
    "gpt --out_dir": "use --output_dir",
    "gpt --init_from": "recipes/finetune.py starts from an existing model",
    "finetune --n_layer": "recipes/gpt.py has this flag",
    # Of transformers and TRL.
    "gpt --model_name_or_path": "recipes/finetune.py has this flag",
    "finetune --gradient_accumulation_steps": "it follows from --global_batch_size",
    "finetune --dataset_name": "use --dataset, with a file, a folder or a name on the hub",
    "gpt --eval_strategy": "use --eval_steps N; 0 turns evaluations off",
    "finetune --warmup_ratio": "use --warmup_steps with the same number",
    "finetune --deepspeed": "accelerate launch --config_file accelerate_configs/fsdp2.yaml",
    "finetune --push_to_bucket": "--push_to_hub uploads the finished model",
    "gpt --max_seq_length": "use --max_length",
    "finetune --packing_strategy": "rows are packed if",
    "preference --use_peft": "use --lora_r 16",
    "finetune --beta": "recipes/preference.py has this flag",
    "preference --use_vllm": "reinforcement learning is not supported",
    "finetune --teacher_model_name_or_path": "distillation is not supported",
    # Of axolotl.
    "finetune --base_model": "use --model_name_or_path",
    "finetune --fp8": "use bf16",
    "gpt --context_parallel_size": "the launcher shards a model",
    "preference --rl": "use --loss_type",
    # Of this package, before they were removed.
    "preference --discopop_tau": "this loss was removed; write it as a function",
    "preference --loss_type bco_pair": "this loss was removed; write it as a function",
    "finetune --optim adafactor": "or give lt.fit an optimizer",
    # Values.
    "gpt --optim ADAMW_torch": "use adamw",
    "preference --loss_type grpo": "reinforcement learning is not supported",
    "gpt --torch_compile true": "use always, or auto",
}


@pytest.mark.parametrize("words", HINTS)
def test_a_flag_or_a_value_of_another_program_is_answered_with_a_hint(words: str) -> None:
    recipe, flag, *value = words.split()
    with_dashes = "--" + flag.lstrip("-").replace("_", "-")

    for typed in (flag, with_dashes):
        message = error_of(recipe, " ".join([typed, *value]))
        beginning = f"{flag}: invalid choice: " if value else f"unknown flag {typed}: "
        assert message.startswith(beginning)
        assert HINTS[words] in message
        assert "did you mean" not in message
        assert "--help" not in message


def test_each_key_in_a_yaml_file_of_another_program_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("max_steps: 3\nlr: 0.1\ndatasets:\n  - path: a\nopim: muon\noptim: adamw_torch")

    message = error_of("finetune", f"--config {path}")

    assert message.startswith(f"{path}: --optim: invalid choice: 'adamw_torch'")
    assert message.endswith(
        "): use adamw; unknown keys: 'lr' (use --learning_rate), 'datasets' (use --dataset, with a "
        "file, a folder or a name on the hub), 'opim' (did you mean optim?); --help lists the flags."
    )


def test_an_unknown_value_without_a_hint_gets_only_the_choices() -> None:
    message = error_of("gpt", "--optim x")
    assert re.search(r"invalid choice: 'x' \(choose from .*\); --help lists the flags\.$", message)


def test_each_hint_is_printed_and_names_only_flags_of_the_recipe_that_prints_it() -> None:
    """No hint is for a flag that is gone, and none has a value that its flag takes."""
    printed = set()
    for recipe, defaults in RECIPES.items():
        parser = FlagParser(configs_of(defaults))
        flags = set(parser._flags)
        for name in hints("recipes"):
            flag, _, value = name.partition("=")
            if (f"--{flag}" in flags) != bool(value) or not hint_for(name, flags):
                continue  # A hint for a value needs the flag, and one for a flag that it is unknown.
            message = error_of(recipe, f"--{flag} {value}")
            hint = message.partition("(choose from ")[2].partition("): ")[2] if value else message
            own_words = re.sub(r"accelerate launch .* RECIPE|unknown flag \S+", "", hint)
            assert set(re.findall(r"--\w+", own_words)) <= flags, message
            assert not re.search(r"[()]", hint), "hints of several flags are in parentheses"
            printed.add(name)

    assert printed == set(hints("recipes"))


def test_each_hint_of_the_commands_is_printed_by_one() -> None:
    parser = build_parser()
    [subparsers] = [action for action in parser._actions if isinstance(action.choices, dict)]
    printed = set()
    for command in ("generate", "chat", "eval", "export"):
        flags = set(subparsers.choices[command]._option_string_actions)
        unknown = {name for name in hints("commands") if f"--{name}" not in flags}
        printed |= {name for name in unknown if hint_for(name, flags, "commands")}
    assert printed == set(hints("commands"))


def test_no_name_has_two_hints() -> None:
    names = re.findall(r"^  (\w[\w=, ]+):", (ROOT / "llmtrain/config/hints.yaml").read_text(), re.M)
    count = sum(len(names_of_hint.split(", ")) for names_of_hint in names)
    assert count == len(hints("recipes")) + len(hints("commands"))


# --- misspelled flags

# Misspelled flags of recipes/finetune.py, with the suggestion.
TYPOS = {
    "learing_rate": "learning_rate",
    "learnign_rtae": "learning_rate",
    "maxsteps": "max_steps",
    "max_len": "max_length",
    "lorar": "lora_r",
    "lora_aplha": "lora_alpha",
    "load_4bit": "load_in_4bit",
    "load_in_4_bit": "load_in_4bit",
    "data": "dataset",
    "eval_datset": "eval_dataset",
    "early_stop": "early_stopping_patience",
    "log_steps": "logging_steps",
    "save_limit": "save_total_limit",
    "ouput_dir": "output_dir",
    "warm_up_steps": "warmup_steps",
    "sed": "seed",
    "tokeniser": "tokenizer",
    "no_pack": "no_packing",
    "resume_from_checkpoints": "resume_from_checkpoint",
    "hlep": "help",
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_misspelled_flag_gets_the_nearest_flag_of_the_recipe(typo: str) -> None:
    question = f"unknown flag --{typo} - did you mean --{TYPOS[typo]}?"
    assert error_of("finetune", f"--{typo}") == f"{question} --help lists the flags."


def test_a_flag_that_resembles_none_gets_no_suggestion() -> None:
    parser = FlagParser(configs_of(RECIPES["finetune"]))
    for name in (
        "packing_strategy",
        "teacher_model_name_or_path",
        "fp8",
        "use_vllm",
        "context_parallel_size",
        "push_to_bucket",
        "cache_implementation",
        "optim_target_modules",
        "nhead",
        "clip",
        "verbose",
    ):
        assert did_you_mean(f"--{name}", parser._flags) == "", name


@pytest.mark.parametrize(
    ("word", "known", "suggestion"),
    [
        # The beginning of several names, and the nearest is last.
        ("--gradient_check", "--gradient_checkpointing_every --gradient_checkpointing", 1),
        # A nearer name begins differently.
        ("--lr_step", "--lr_step_schedule_file --lr_step_warmup_factor --max_lr_step", 2),
        # The beginning of one name only, however long it is.
        ("--siz", "--sit --size_of_vocabulary", 1),
    ],
)
def test_the_beginning_of_several_names_gets_the_nearest_of_all_names(
    word: str, known: str, suggestion: int
) -> None:
    names = known.split()
    assert did_you_mean(word, names) == f" - did you mean {names[suggestion]}?"


def test_the_page_of_questions_shows_the_error() -> None:
    page = (ROOT / "docs" / "guides" / "faq.md").read_text()
    example = re.search(r"\$ python recipes/finetune.py (.*)\nerror: (.*)\n", page)
    assert example
    flags, message = example.groups()
    assert error_of("finetune", flags) == message
