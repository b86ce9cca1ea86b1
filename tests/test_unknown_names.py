"""A flag of another program is answered with what to write here, and that is true of the recipe."""

import re
import runpy
from pathlib import Path

import pytest

from llmtrain.cli import build_parser
from llmtrain.config.command_line import parse
from llmtrain.config.flags import configs_of, flags_of
from llmtrain.config.unknown_names import flags_in, hint_for, hints
from llmtrain.errors import UserError
from tests.launching import ROOT

RECIPES = {
    name: runpy.run_path(str(ROOT / "recipes" / f"{name}.py"))["DEFAULTS"]
    for name in ("gpt", "finetune", "preference")
}


def error_of(recipe: str, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(RECIPES[recipe], list(argv))
    return str(caught.value)


def own_flags(recipe: str) -> set[str]:
    """The flags of a recipe, without other names of them."""
    flags = {"--config"}
    for config in configs_of(RECIPES[recipe]).values():
        for name, field in flags_of(config).items():
            flags.add(f"--{name}")
            if field.default is None and name in ("packing", "share_prompts"):
                flags.add(f"--no_{name}")
    return flags


def other_names(recipe: str) -> set[str]:
    configs = configs_of(RECIPES[recipe]).values()
    fields = [field for config in configs for field in flags_of(config).values()]
    return {f"--{field.metadata['alias']}" for field in fields if field.metadata["alias"]}


# A flag that users of another program type -> a part of the answer, in each recipe.
ANSWERS = {
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
# The same, if the answer depends on the recipe.
ANSWERS_OF = {
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
CASES = [(recipe, name, answer) for name, answer in ANSWERS.items() for recipe in RECIPES]
CASES += [(recipe, name, answer) for (recipe, name), answer in ANSWERS_OF.items()]


@pytest.mark.parametrize(("recipe", "name", "answer"), CASES)
def test_a_flag_of_another_program_is_answered_on_the_command_line(recipe, name, answer) -> None:
    for word in (f"--{name}", f"--{name.replace('_', '-')}=x"):
        message = error_of(recipe, word)
        assert message.startswith(f"unknown flag {word.partition('=')[0]}: ")
        assert answer in message
        assert "did you mean" not in message


def test_a_yaml_file_of_another_program_is_answered_in_one_line(tmp_path: Path) -> None:
    """With a hint for each of its keys, also for those with nested values."""
    path = tmp_path / "axolotl.yaml"
    lines = [f"{name}: {{a: [b]}}" for name in ANSWERS]
    path.write_text("max_steps: 3\n" + "\n".join(lines))
    message = error_of("finetune", "--config", str(path))
    assert message.startswith(f"{path}: unknown keys: 'lr' (use --learning_rate), 'bf16' (")
    assert "\n" not in message
    for name, answer in ANSWERS.items():
        assert re.search(rf"'{name}' \([^()]*{re.escape(answer)}", message), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hint_names_only_flags_of_the_recipe_that_prints_it(recipe: str) -> None:
    own = own_flags(recipe)
    taken = own | other_names(recipe)
    answered = {f"--{name}": hint_for(name, own) for name in hints("recipes") if "=" not in name}
    answered = {flag: hint for flag, hint in answered.items() if hint and flag not in taken}
    message = error_of(recipe, *answered)
    for unknown, hint in answered.items():
        assert f"{unknown} ({hint})" in message
        assert not re.search(r"[()]|\.$", hint), "hints of several flags are in parentheses"
        for flag in flags_in(hint):
            assert flag in own, unknown
            assert flag != unknown


@pytest.mark.parametrize("name", hints("recipes"))
def test_each_hint_is_printed_by_a_recipe(name: str) -> None:
    """No hint is for a flag that is gone, and none has a value that its flag takes."""
    flag, _, value = name.partition("=")
    printed = set()
    for recipe in RECIPES:
        words = [f"--{flag}", value] if value else [f"--{flag}"]
        is_own = f"--{flag}" in own_flags(recipe) | other_names(recipe)
        hint = hint_for(name, own_flags(recipe))
        if hint and is_own == bool(value):
            assert error_of(recipe, *words).endswith(f": {hint}.")
            printed.add(hint)
    assert printed


@pytest.mark.parametrize(
    ("recipe", "flag", "value", "answer"),
    [
        ("finetune", "optim", "adamw_torch", "use adamw."),
        ("gpt", "optim", "adamw_torch_fused", "use adamw."),
        ("finetune", "optim", "adamw_bnb_8bit", "use adamw_torch_8bit."),
        ("gpt", "optim", "lion", "this optimizer is not supported; use adamw."),
        ("preference", "loss_type", "dpo", "use sigmoid, which is the loss of DPO."),
        ("preference", "loss_type", "aot_pair", "use aot, which has the same formula."),
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
def test_a_value_of_another_program_is_answered_beside_the_choices(
    recipe: str, flag: str, value: str, answer: str
) -> None:
    for argv in ([f"--{flag}", value], [f"--{flag.replace('_', '-')}={value}", "--max_steps=3"]):
        message = error_of(recipe, *argv)
        assert message.startswith(f"--{flag}: invalid choice: '{value}' (choose from ")
        assert f"): {answer}" in message


def test_a_value_of_another_program_is_answered_in_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text("optim: adamw_hf\n")
    message = error_of("finetune", "--config", str(path))
    assert message.startswith(f"{path}: --optim: invalid choice: 'adamw_hf'")
    assert message.endswith("): use adamw.")


def test_a_wrong_value_of_no_program_gets_only_the_choices() -> None:
    message = error_of("gpt", "--optim", "x")
    assert re.search(r"invalid choice: 'x' \(choose from .*\); --help lists the flags\.$", message)


def test_an_unknown_flag_of_no_program_gets_the_nearest_name() -> None:
    assert "--learning_rat - did you mean --learning_rate?" in error_of("gpt", "--learning_rat")


# A misspelled flag -> the flag that is meant, in each recipe; None if the recipe has no such flag.
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


@pytest.mark.parametrize("typo", TYPOS)
def test_a_misspelled_flag_gets_the_flag_that_is_meant(typo: str) -> None:
    for recipe, meant in zip(("gpt", "finetune"), TYPOS[typo], strict=True):
        message = error_of(recipe, f"--{typo}")
        if meant:
            suggestion = f" - did you mean --{meant}?"
            assert message == f"unknown flag --{typo}{suggestion} --help lists the flags."
        else:
            assert "did you mean" not in message


def test_the_page_of_questions_shows_the_error() -> None:
    page = (ROOT / "docs" / "guides" / "faq.md").read_text()
    shown = re.search(r"\$ python recipes/finetune.py (.*)\nerror: (.*)\n", page)
    assert shown
    assert error_of("finetune", *shown[1].split()) == shown[2]


@pytest.mark.parametrize("name", hints("commands"))
def test_each_hint_of_the_commands_is_printed_by_one(name: str) -> None:
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    commands = [subparsers.choices[command] for command in ("generate", "chat", "eval", "export")]
    flags = [set(command._option_string_actions) for command in commands]
    assert any(f"--{name}" not in known and hint_for(name, known, "commands") for known in flags)
