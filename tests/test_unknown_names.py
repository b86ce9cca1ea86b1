"""A flag of another program is answered with the flag to use here, and the recipe has that flag."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from llmtrain.cli import build_parser
from llmtrain.config.command_line import parse
from llmtrain.config.flags import configs_of, flags_of
from llmtrain.config.unknown_names import did_you_mean, flags_in, hint_for, hints
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


def flags_of_recipe(recipe: str) -> set[str]:
    """Return the flags of a recipe, by their first names."""
    flags = {"--config"}
    for config in configs_of(RECIPES[recipe]).values():
        for name, field in flags_of(config).items():
            flags.add(f"--{name}")
            if field.default is None and name in ("packing", "share_prompts"):
                flags.add(f"--no_{name}")
    return flags


def aliases_of_recipe(recipe: str) -> set[str]:
    """Return the second names of flags."""
    aliases = set()
    for config in configs_of(RECIPES[recipe]).values():
        names = [field.metadata["alias"] for field in flags_of(config).values()]
        aliases |= {f"--{name}" for name in names if name}
    return aliases


# --- flags


# Flags that users of other programs type, with a part of the hint that every recipe gives.
HINTS = {
    "lr": "use --learning_rate",
    "bf16": "accelerate launch --mixed_precision bf16",
    "fp16": "accelerate launch --mixed_precision fp16",
    "tf32": "leave it out: on a GPU, float32 products are computed in TF32",
    "torch_dtype": "use --dtype for the weights that are trained",
    "gradient_accumulation_steps": "it follows from --global_batch_size, --per_device_train_batch",
    "batch_size": "use --global_batch_size",
    "micro_batch_size": "use --per_device_train_batch_size",
    "per_device_eval_batch_size": "evaluations use --per_device_train_batch_size",
    "train_file": "use --dataset FILE",
    "validation_file": "use --eval_dataset FILE",
    "dataset_name": "use --dataset, with a file, a folder or a name on the hub",
    "datasets": "use --dataset, with a file, a folder or a name on the hub",
    "dataset_config": "use --dataset NAME:CONFIGURATION",
    "dataset_config_name": "use --dataset NAME:CONFIGURATION",
    "val_set_size": "use --eval_fraction",
    "eval_strategy": "use --eval_steps N; 0 turns evaluations off",
    "eval_interval": "use --eval_steps",
    "save_strategy": "use --save_steps",
    "logging_strategy": "use --logging_steps",
    "warmup_ratio": "use --warmup_steps",
    "num_epochs": "use --",
    "epochs": "use --",
    "max_iters": "use --max_steps",
    "learning_rate_schedule": "use --lr_scheduler_type",
    "lr_scheduler": "use --lr_scheduler_type",
    "min_lr_rate": "use --min_lr, the learning rate at which the schedule ends; it is no ratio",
    "optimizer": "use --optim adamw or --optim muon",
    "activation_checkpointing": "use --gradient_checkpointing",
    "hub_model_id": "use --push_to_hub NAME/MODEL",
    "deepspeed": "DeepSpeed is not supported; the launcher shards a model",
    "fsdp": "accelerate launch --config_file accelerate_configs/fsdp2.yaml",
    "do_train": "leave it out",
    "do_eval": "use --eval_steps N; 0 turns evaluations off",
    "overwrite_output_dir": "to start a new run beside it, use --resume_from_checkpoint never",
    "compile": "use --torch_compile",
    "device": "accelerate launch --cpu",
    "wandb_project": "set WANDB_PROJECT",
    "wandb_log": "--report_to is wandb by default",
    "out_dir": "use --output_dir",
    "resume": "the same command resumes",
    "logging_dir": "--report_to tensorboard writes to the run folder",
    "ddp_find_unused_parameters": "leave it out",
    "neftune_noise_alpha": "not supported; leave it out",
    "num_processes": "goes before the recipe: accelerate launch --multi_gpu --num_processes 2",
    "mixed_precision": "goes before the recipe: accelerate launch --mixed_precision bf16",
}
# Flags whose hint depends on the recipe.
HINTS_OF_RECIPE = {
    ("gpt", "max_seq_length"): "use --block_size",
    ("finetune", "max_seq_length"): "use --max_length",
    ("preference", "max_seq_len"): "use --max_length",
    ("finetune", "sequence_len"): "use --max_length",
    ("preference", "max_prompt_length"): "use --max_length, which limits a prompt together with",
    ("preference", "max_completion_length"): "use --max_length, which limits a prompt together",
    ("finetune", "assistant_only_loss"): "only the assistant's turns are trained",
    ("finetune", "completion_only_loss"): "only the completion is trained",
    ("finetune", "train_on_inputs"): "prompts are not trained",
    ("preference", "train_on_inputs"): "prompts are not trained",
    ("finetune", "chat_template_path"): "use --chat_template",
    ("gpt", "chat_template_path"): "recipes/finetune.py trains on conversations",
    ("preference", "truncation_mode"): "use --overlong truncate",
    ("finetune", "group_by_length"): "with --no_packing those of similar length are put together",
    ("gpt", "group_by_length"): "all rows of text have --block_size tokens",
    ("finetune", "sample_packing"): "use --packing or --no_packing",
    ("gpt", "packing"): "text always fills its rows",
    ("finetune", "use_peft"): "use --lora_r 16",
    ("preference", "use_lora"): "use --lora_r 16",
    ("finetune", "adapter"): "use --lora_r 16 for LoRA, and --load_in_4bit as well for QLoRA",
    ("gpt", "lora_r"): "recipes/finetune.py trains LoRA adapters",
    ("finetune", "modules_to_save"): "use --lora_modules_to_save, with --lora_r",
    ("gpt", "use_rslora"): "recipes/finetune.py trains LoRA adapters",
    ("preference", "resume_adapter"): "use --model_name_or_path with the adapter",
    ("gpt", "load_in_4bit"): "recipes/finetune.py trains LoRA adapters",
    ("finetune", "load_in_8bit"): "use --load_in_4bit with --lora_r 16",
    ("finetune", "base_model"): "use --model_name_or_path",
    ("preference", "model"): "use --model_name_or_path",
    ("gpt", "model_name_or_path"): "recipes/finetune.py starts from an existing model",
    ("finetune", "n_layers"): 'use --config_overrides "num_hidden_layers=8"',
    ("gpt", "num_hidden_layers"): "use --n_layer",
    ("gpt", "init_from"): "recipes/finetune.py starts from an existing model",
    ("finetune", "init_from"): "use --model_name_or_path",
    ("finetune", "beta"): "a setting of recipes/preference.py",
    ("preference", "dpo_beta"): "use --beta",
    ("preference", "ref_model"): "the reference in --loss_type is the model with its initial",
}
EVERY_HINT = [(recipe, *hint) for recipe in RECIPES for hint in HINTS.items()]
EVERY_HINT += [(recipe, name, hint) for (recipe, name), hint in HINTS_OF_RECIPE.items()]


@pytest.mark.parametrize(("recipe", "name", "hint"), EVERY_HINT)
def test_a_flag_of_another_program_is_answered_with_a_hint(
    recipe: str, name: str, hint: str
) -> None:
    with_dashes = name.replace("_", "-")
    for flag, words in ((f"--{name}", f"--{name}"), (f"--{with_dashes}", f"--{with_dashes}=x")):
        message = error_of(recipe, words)
        assert message.startswith(f"unknown flag {flag}: ")
        assert hint in message
        assert "did you mean" not in message


def test_each_key_in_a_yaml_file_of_another_program_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    lines = ["max_steps: 3", *(f"{name}: {{a: [b]}}" for name in HINTS)]  # also nested values
    path.write_text("\n".join(lines))

    message = error_of("finetune", f"--config {path}")

    assert message.startswith(f"{path}: unknown keys: 'lr' (use --learning_rate), 'bf16' (")
    for name, hint in HINTS.items():
        assert re.search(rf"'{name}' \([^()]*{re.escape(hint)}", message), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hint_names_only_flags_of_the_recipe_that_prints_it(recipe: str) -> None:
    own_flags = flags_of_recipe(recipe)
    known_names = own_flags | aliases_of_recipe(recipe)
    hint_of_flag = {}
    for name in hints("recipes"):
        hint = hint_for(name, own_flags)
        is_flag = "=" not in name
        if is_flag and hint and f"--{name}" not in known_names:
            hint_of_flag[f"--{name}"] = hint

    message = error_of(recipe, " ".join(hint_of_flag))

    for unknown_flag, hint in hint_of_flag.items():
        assert f"{unknown_flag} ({hint})" in message
        assert not re.search(r"[()]|\.$", hint), "hints of several flags are in parentheses"
        assert flags_in(hint) <= own_flags, unknown_flag
        assert unknown_flag not in flags_in(hint)


@pytest.mark.parametrize("name", hints("recipes"))
def test_each_hint_is_printed_by_a_recipe(name: str) -> None:
    """No hint is for a flag that is gone, and none has a value that its flag takes."""
    flag, _, value = name.partition("=")
    printed_hints = set()
    for recipe in RECIPES:
        own_flags = flags_of_recipe(recipe)
        is_known = f"--{flag}" in own_flags | aliases_of_recipe(recipe)
        hint = hint_for(name, own_flags)
        # A hint for a value needs the flag, and a hint for a flag needs that it is unknown.
        if hint and is_known == bool(value):
            assert error_of(recipe, f"--{flag} {value}").endswith(f": {hint}.")
            printed_hints.add(hint)
    assert printed_hints


@pytest.mark.parametrize("name", hints("commands"))
def test_each_hint_of_the_commands_is_printed_by_one(name: str) -> None:
    parser = build_parser()
    [subparsers] = [action for action in parser._actions if isinstance(action.choices, dict)]
    printing_commands = []
    for command in ("generate", "chat", "eval", "export"):
        flags = set(subparsers.choices[command]._option_string_actions)
        if f"--{name}" not in flags and hint_for(name, flags, "commands"):
            printing_commands.append(command)
    assert printing_commands


# --- values


@pytest.mark.parametrize(
    ("recipe", "flag", "value", "hint"),
    [
        ("finetune", "optim", "adamw_torch", "use adamw."),
        ("gpt", "optim", "adamw_torch_fused", "use adamw."),
        ("finetune", "optim", "adamw_bnb_8bit", "use adamw_torch_8bit."),
        ("gpt", "optim", "lion", "this optimizer is not supported; use adamw."),
        ("preference", "loss_type", "dpo", "use sigmoid, which is the loss of DPO."),
        ("preference", "loss_type", "bco_pair", "this loss was removed; write it as a function"),
        ("preference", "loss_type", "alphapo", "this loss is not supported; simpo and orpo"),
        ("finetune", "lr_scheduler_type", "constant_with_warmup", "use constant, which has the"),
        ("finetune", "lr_scheduler_type", "cosine_with_restarts", "use cosine, which falls"),
        ("gpt", "lr_scheduler_type", "inverse_sqrt", "this schedule is not supported; cosine and"),
        ("gpt", "lr_scheduler_type", "WSD", "use warmup_stable_decay."),
        ("gpt", "torch_compile", "true", "use always, or auto to compile a long run on a GPU."),
        ("gpt", "architecture", "llama", "use lfm2; recipes/finetune.py trains other"),
        ("finetune", "overlong", "keep_start", "use truncate, which keeps the beginning."),
        ("finetune", "format", "chat_template", "use messages, or auto."),
    ],
)
def test_a_value_of_another_program_is_answered_after_the_choices(
    recipe: str, flag: str, value: str, hint: str
) -> None:
    with_dashes = flag.replace("_", "-")
    for words in (f"--{flag} {value}", f"--{with_dashes}={value} --max_steps=3"):
        message = error_of(recipe, words)
        assert message.startswith(f"--{flag}: invalid choice: '{value}' (choose from ")
        assert f"): {hint}" in message


def test_a_value_of_another_program_is_answered_in_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text("optim: adamw_hf\n")

    message = error_of("finetune", f"--config {path}")

    assert message.startswith(f"{path}: --optim: invalid choice: 'adamw_hf'")
    assert message.endswith("): use adamw.")


def test_an_unknown_value_without_a_hint_gets_only_the_choices() -> None:
    message = error_of("gpt", "--optim x")
    assert re.search(r"invalid choice: 'x' \(choose from .*\); --help lists the flags\.$", message)


# --- misspelled flags

# Misspelled flags, with the suggestions of recipes/gpt.py and recipes/finetune.py, or None.
TYPOS: dict[str, tuple[str | None, str | None]] = {
    "learing_rate": ("learning_rate", "learning_rate"),
    "learningrate": ("learning_rate", "learning_rate"),
    "max_step": ("max_steps", "max_steps"),
    "maxsteps": ("max_steps", "max_steps"),
    "lorar": (None, "lora_r"),
    "lora_rr": (None, "lora_r"),
    "lora_aplha": (None, "lora_alpha"),
    "load_4bit": (None, "load_in_4bit"),
    "load_in_4_bit": (None, "load_in_4bit"),
    "datset": ("dataset", "dataset"),
    "data": ("dataset", "dataset"),
    "eval_datset": ("eval_dataset", "eval_dataset"),
    "eval_frac": ("eval_fraction", "eval_fraction"),
    "evalsteps": ("eval_steps", "eval_steps"),
    "early_stop": ("early_stopping_patience", "early_stopping_patience"),
    "early_stopping_patiance": ("early_stopping_patience", "early_stopping_patience"),
    "log_steps": ("logging_steps", "logging_steps"),
    "save_step": ("save_steps", "save_steps"),
    "save_limit": ("save_total_limit", "save_total_limit"),
    "ouput_dir": ("output_dir", "output_dir"),
    "outputdir": ("output_dir", "output_dir"),
    "num_train_epoch": ("num_train_epochs", "num_train_epochs"),
    "warm_up_steps": ("warmup_steps", "warmup_steps"),
    "weightdecay": ("weight_decay", "weight_decay"),
    "sed": ("seed", "seed"),
    "tokeniser": ("tokenizer", "tokenizer"),
    "report": ("report_to", "report_to"),
    "push": ("push_to_hub", "push_to_hub"),
    "pack": (None, "packing"),
    "no_pack": (None, "no_packing"),
    "max_len": ("max_length", "max_length"),
    "block_sise": ("block_size", "block_size"),
    "nhead": ("n_head", None),
    "nembd": ("n_embd", None),
    "clip": (None, None),
    "verbose": (None, None),
    "gradient_checkpoint": ("gradient_checkpointing", "gradient_checkpointing"),
    "resume_from_checkpoints": ("resume_from_checkpoint", "resume_from_checkpoint"),
    "attn_implementaton": (None, "attn_implementation"),
    "chat_temlate": (None, "chat_template"),
    "torch_compil": ("torch_compile", "torch_compile"),
    "hlep": ("help", "help"),
    "print_confg": ("print_config", "print_config"),
}


@pytest.mark.parametrize("recipe", ["gpt", "finetune"])
@pytest.mark.parametrize("typo", TYPOS)
def test_a_misspelled_flag_gets_the_nearest_flag_of_the_recipe(typo: str, recipe: str) -> None:
    gpt_flag, finetune_flag = TYPOS[typo]
    suggestion = gpt_flag if recipe == "gpt" else finetune_flag

    message = error_of(recipe, f"--{typo}")

    if suggestion:
        question = f"did you mean --{suggestion}?"
        assert message == f"unknown flag --{typo} - {question} --help lists the flags."
    else:
        assert "did you mean" not in message


@pytest.mark.parametrize(
    ("word", "known", "question"),
    [
        pytest.param(
            "--gradient_check",
            ["--gradient_checkpointing", "--gradient_checkpointing_every"],
            " - did you mean --gradient_checkpointing?",
            id="several names, the nearest first",
        ),
        pytest.param(
            "--gradient_check",
            ["--gradient_checkpointing_every", "--gradient_checkpointing"],
            " - did you mean --gradient_checkpointing?",
            id="several names, the nearest last",
        ),
        pytest.param(
            "--lr_step",
            ["--lr_step_schedule_file", "--lr_step_warmup_factor", "--max_lr_step"],
            " - did you mean --max_lr_step?",
            id="several names, and a nearer one that begins differently",
        ),
        pytest.param("--e", ["--eval_steps", "--eval_fraction"], "", id="several names, none near"),
        pytest.param(
            "--siz",
            ["--sit", "--size_of_vocabulary"],
            " - did you mean --size_of_vocabulary?",
            id="one name, and a nearer one that begins differently",
        ),
    ],
)
def test_the_beginning_of_several_names_gets_the_nearest_of_all_names(
    word: str, known: list[str], question: str
) -> None:
    """The beginning of only one name gets that name, however long it is."""
    assert did_you_mean(word, known) == question


def test_the_page_of_questions_shows_the_error() -> None:
    page = (ROOT / "docs" / "guides" / "faq.md").read_text()
    example = re.search(r"\$ python recipes/finetune.py (.*)\nerror: (.*)\n", page)
    assert example
    flags, message = example.groups()
    assert error_of("finetune", flags) == message
