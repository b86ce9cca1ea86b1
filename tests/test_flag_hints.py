"""A flag of another program is answered with what to write here, and that is true of the recipe."""

import dataclasses
import importlib
import re
import runpy
from pathlib import Path

import pytest

from llmtrain.cli import build_parser
from llmtrain.config import configs_of, flags_of, parse
from llmtrain.errors import UserError
from llmtrain.flag_hints import (
    LAUNCHER_FLAGS,
    command_hint,
    flags_in,
    hint_for,
    known_command_names,
    known_names,
    known_values,
)
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
    """The flags of a recipe, without aliases."""
    flags = {"--config"}
    for config in configs_of(RECIPES[recipe]).values():
        for name, field in flags_of(config).items():
            flags.add(f"--{name}")
            if field.default is None and name in ("packing", "share_prompts"):
                flags.add(f"--no_{name}")
    return flags


def aliases(recipe: str) -> set[str]:
    configs = configs_of(RECIPES[recipe]).values()
    fields = [field for config in configs for field in flags_of(config).values()]
    return {f"--{field.metadata['alias']}" for field in fields if field.metadata["alias"]}


def hints_of(recipe: str, value: str) -> dict[str, str]:
    """The hints that a recipe prints, by the unknown flag, if each has this value."""
    own = own_flags(recipe)
    taken = own | aliases(recipe)
    hints = {f"--{name}": hint_for(name, own, value) for name in known_names()}
    return {flag: hint for flag, hint in hints.items() if hint and flag not in taken}


# A flag that users of another program type -> a part of the answer, in each recipe.
ANSWERS = {
    "lr": "use --learning_rate",
    "bf16": "accelerate launch --mixed_precision bf16",
    "fp16": "accelerate launch --mixed_precision fp16",
    "tf32": "leave it out: on a GPU, float32 products are computed in TF32",
    "dtype": "trained weights are float32",
    "torch_dtype": "trained weights are float32",
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
    "optimizer": "use --optim adamw or --optim muon",
    "activation_checkpointing": "use --gradient_checkpointing",
    "hub_model_id": "use --push_to_hub NAME/MODEL",
    "deepspeed": "DeepSpeed is not supported; the launcher shards a model",
    "fsdp": "accelerate launch --config_file accelerate_configs/fsdp2.yaml",
    "do_train": "leave it out",
    "do_eval": "leave it out: the run evaluates every --eval_steps steps",
    "overwrite_output_dir": "no run is overwritten; --resume_from_checkpoint never starts a new",
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


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hint_names_only_flags_of_the_recipe_that_prints_it(recipe: str, value: str) -> None:
    hints = hints_of(recipe, value)
    assert len(hints) > 200
    message = error_of(recipe, *[f"{flag}={value}" for flag in hints])
    own = own_flags(recipe)
    for unknown, hint in hints.items():
        assert f"{unknown} ({hint})" in message
        assert not re.search(r"[()]|\.$", hint), "hints of several flags are in parentheses"
        for flag in re.findall(r"--\w+", hint):
            if flag in LAUNCHER_FLAGS:
                assert re.search(rf"accelerate launch .*{flag}\b", hint), unknown
            else:
                assert flag in own, unknown
                assert flag != unknown


@pytest.mark.parametrize(
    ("recipe", "flag", "value", "answer"),
    [
        ("finetune", "optim", "adamw_torch", "use adamw."),
        ("gpt", "optim", "adamw_torch_fused", "use adamw."),
        (
            "finetune",
            "optim",
            "paged_adamw_8bit",
            "optimizers with 8 bits or pages are not supported",
        ),
        ("gpt", "optim", "adafactor", "this optimizer is not supported; use adamw."),
        ("preference", "loss_type", "dpo", "use sigmoid, which is the loss of DPO."),
        ("preference", "loss_type", "hinge", "this loss is not supported"),
        ("finetune", "lr_scheduler_type", "constant_with_warmup", "use constant, which has the"),
        ("finetune", "lr_scheduler_type", "cosine_with_min_lr", "use cosine, which falls"),
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


def test_a_hint_for_a_value_names_only_flags_of_the_recipes_that_have_its_flag() -> None:
    answered = set()
    for recipe in RECIPES:
        own = own_flags(recipe)
        for name, value in known_values():
            if f"--{name}" in own:
                hint = hint_for(name, own, value)
                assert hint, f"{recipe}: --{name} {value}"
                assert error_of(recipe, f"--{name}", value).endswith(f"): {hint}.")
                answered.add((name, value))
    assert answered == set(known_values())


# Keys of axolotl's configs.
AXOLOTL = """
    base_model tokenizer_config model_type trust_remote_code load_in_8bit load_in_4bit bf16 fp16
    tf32 gptq datasets test_datasets pretraining_dataset shuffle_merged_datasets streaming
    dataset_prepared_path dataset_processes val_set_size hub_model_id hf_use_auth_token sequence_len
    pad_to_sequence_len sample_packing eval_sample_packing adapter lora_model_dir lora_r lora_alpha
    lora_dropout lora_target_modules lora_target_linear lora_modules_to_save lora_fan_in_fan_out
    peft_use_rslora peft_use_dora loraplus_lr_ratio relora_steps wandb_mode wandb_project
    wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model use_wandb use_mlflow use_comet
    mlflow_tracking_uri mlflow_experiment_name comet_project_name use_tensorboard torch_compile
    gradient_accumulation_steps micro_batch_size eval_batch_size num_epochs warmup_steps
    warmup_ratio learning_rate evals_per_epoch saves_per_epoch save_only_model save_safetensors
    train_on_inputs group_by_length gradient_checkpointing gradient_checkpointing_kwargs
    activation_offloading early_stopping_patience lr_scheduler cosine_min_lr_ratio
    cosine_constant_lr_ratio optimizer optim_target_modules weight_decay xformers_attention
    flash_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv
    flash_attn_fuse_mlp sdp_attention eager_attention flex_attention s2_attention low_cpu_mem_usage
    resume_from_checkpoint auto_resume_from_checkpoints special_tokens tokens eval_table_size
    eval_max_new_tokens profiler_steps loss_watchdog_threshold loss_watchdog_patience fsdp
    fsdp_config deepspeed sequence_parallel_degree context_parallel_size tensor_parallel_size
    dp_shard_size local_rank seed strict debug plugins liger_rope liger_rms_norm
    liger_glu_activation liger_fused_linear_cross_entropy cut_cross_entropy unfrozen_parameters
    chat_template default_system_message rl trl split_batches device_map
"""
# Settings of nanoGPT: of train.py, and of the configs in its folder config/.
NANOGPT = """
    out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from
    wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size
    n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip
    decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile start num_samples
    max_new_tokens
"""
# Flags of litgpt, and of the example scripts of transformers and accelerate.
LITGPT = """
    precision quantize devices num_nodes out_dir lora_query lora_key lora_value lora_projection
    lora_mlp lora_head logger_name access_token model_config initial_checkpoint_dir tokenizer_dir
    max_tokens tie_embeddings lr_warmup_fraction max_norm initial_validation final_validation
"""
EXAMPLES = """
    train_file validation_file model_type config_name tokenizer_name cache_dir use_fast_tokenizer
    model_revision token use_auth_token torch_dtype low_cpu_mem_usage dataset_name
    dataset_config_name max_train_samples max_eval_samples max_samples streaming overwrite_cache
    validation_split_percentage preprocessing_num_workers adafactor use_rslora shuffle shuffle_seed
    eos_token bos_token pad_token lora_modules with_tracking seed
"""
LISTS = {"axolotl": AXOLOTL, "nanogpt": NANOGPT, "litgpt": LITGPT, "examples": EXAMPLES}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("program", LISTS)
def test_every_name_of_another_program_is_a_flag_or_has_a_hint(recipe: str, program: str) -> None:
    assert without_answer(recipe, LISTS[program].split()) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "dataclass",
    [
        "transformers.TrainingArguments",
        "trl.SFTConfig",
        "trl.DPOConfig",
        "trl.KTOConfig",
        "trl.RewardConfig",
        "trl.ScriptArguments",
        "trl.ModelConfig",
    ],
)
def test_every_field_of_transformers_and_trl_is_a_flag_or_has_a_hint(
    recipe: str, dataclass: str
) -> None:
    package, _, name = dataclass.partition(".")
    if package == "trl":
        pytest.importorskip("trl")
    fields = dataclasses.fields(getattr(importlib.import_module(package), name))
    assert without_answer(recipe, [field.name for field in fields]) == []


def without_answer(recipe: str, names: list[str]) -> list[str]:
    """The names that are neither flags of a recipe nor have a hint in it."""
    own = own_flags(recipe)
    taken = own | aliases(recipe)
    return [name for name in names if f"--{name}" not in taken and not hint_for(name, own)]


# A switch of another program that is off -> a part of the answer, in each recipe.
OFF_ANSWERS = {
    "wandb_log": "use --report_to none.",
    "use_wandb": "use --report_to none.",
    "bf16": "--mixed_precision no RECIPE",
    "fp16": "leave it out: the launcher sets the precision",
    "tf32": "TF32 cannot be turned off, except with --bitwise.",
    "do_eval": "use --eval_steps 0, which turns evaluations off.",
    "eval_strategy": "use --eval_steps 0, which turns evaluations off.",
    "save_strategy": "use a --save_steps as large as --max_steps",
    "compile": "use --torch_compile never.",
    "decay_lr": "use --lr_scheduler_type constant.",
    "load_in_8bit": "leave it out: this is off by default.",
    "use_peft": "leave it out: this is off by default.",
    "use_lora": "leave it out: this is off by default.",
    "qlora": "leave it out: this is off by default.",
    "adapter": "leave it out: this is off by default.",
    "flash_attention": "leave it out: this is off by default.",
    "use_tensorboard": "leave it out: --report_to is wandb by default; none turns it off.",
    "early_stopping": "leave it out: --early_stopping_patience is 0 by default.",
    "activation_checkpointing": "leave it out: --gradient_checkpointing is off by default.",
    "resume": "use --resume_from_checkpoint never, which starts a new run.",
    "hub_private_repo": "a new repository of --push_to_hub is private, and the hub can make it",
    "use_cpu": "leave it out: a GPU is used if there is one.",
    "deepspeed": "leave it out: a model is sharded only if the launcher is told to.",
    "wandb_project": "set WANDB_PROJECT in the environment",
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("name", "answer"), OFF_ANSWERS.items())
def test_a_switch_that_is_off_is_answered_for_that_value(
    recipe: str, name: str, answer: str, tmp_path: Path
) -> None:
    path = tmp_path / "trainer.yaml"
    for word in ("false", "False", "no", "0"):
        path.write_text(f"{name}: {word}\n")
        for argv in ([f"--{name}", word], [f"--{name.replace('_', '-')}={word}"]):
            assert answer in error_of(recipe, *argv)
        assert answer in error_of(recipe, "--config", str(path))


def test_a_switch_that_is_on_or_has_no_value_is_not_answered_as_one_that_is_off() -> None:
    for argv in (["--wandb_log", "True"], ["--wandb_log"], ["--wandb_log", "--dry_run", "false"]):
        assert "leave it out: --report_to is wandb by default" in error_of("gpt", *argv)
    several = error_of("gpt", "--bf16", "true", "--fp16", "false", "--use_wandb", "--do_eval=0")
    assert "--bf16 (the launcher sets the precision, and bf16 is the default" in several
    assert "--fp16 (leave it out" in several
    assert "--use_wandb (leave it out: --report_to is wandb" in several
    assert "--do_eval (use --eval_steps 0" in several


def test_the_no_form_of_a_switch_is_answered_as_its_value_false() -> None:
    assert error_of("gpt", "--no_wandb") == "unknown flag --no_wandb: use --report_to none."
    assert "use --gradient_checkpointing false." in error_of("gpt", "--no_gradient_checkpointing")
    assert "use --gradient_checkpointing false." in error_of("gpt", "--no-gradient-checkpointing")


def test_a_key_without_a_value_is_answered_with_leaving_it_out(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("wandb_project:\nlr: null\nfsdp: []\nadapter:\nlearing_rate:\n")
    assert error_of("finetune", "--config", str(path)) == (
        f"{path}: unknown keys: 'wandb_project' (leave it out: it has no value), 'lr' (leave it "
        "out: it has no value), 'fsdp' (leave it out: a model is sharded only if the launcher is "
        "told to), 'adapter' (leave it out: this is off by default), 'learing_rate' (did you mean "
        "learning_rate?); --help lists the flags."
    )


def test_a_wrong_value_of_no_program_gets_only_the_choices() -> None:
    message = error_of("gpt", "--optim", "x")
    assert re.search(r"invalid choice: 'x' \(choose from .*\); --help lists the flags\.$", message)


def test_an_unknown_flag_of_no_program_gets_the_nearest_name() -> None:
    assert "--learning_rat - did you mean --learning_rate?" in error_of("gpt", "--learning_rat")
    assert "--n_layers - did you mean --n_layer?" in error_of("gpt", "--n_layers")


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


@pytest.mark.parametrize(
    ("recipe", "typo", "answer"),
    [
        ("gpt", "gradient_acumulation_steps", "if you mean gradient_accumulation_steps, leave it"),
        ("finetune", "micro_batchsize", "if you mean micro_batch_size, use --per_device_train"),
        ("finetune", "sequence_lenn", "if you mean sequence_len, use --max_length."),
        ("gpt", "lorar", "if you mean lora_r, this recipe trains a new GPT"),
        ("gpt", "load_in_4-bit", "if you mean load_in_4bit, this recipe trains a new GPT"),
        ("finetune", "n_layer_", "if you mean n_layer, with --from_config, use"),
    ],
)
def test_a_misspelled_name_of_another_program_gets_its_hint(
    recipe: str, typo: str, answer: str
) -> None:
    assert error_of(recipe, f"--{typo}").startswith(f"unknown flag --{typo}: {answer}")
    off = error_of("finetune", "--wandb_logg", "false")
    assert off == "unknown flag --wandb_logg: if you mean wandb_log, use --report_to none."


def test_the_page_of_questions_shows_the_error() -> None:
    page = (ROOT / "docs" / "guides" / "faq.md").read_text()
    shown = re.search(r"\$ python recipes/finetune.py (.*)\nerror: (.*)\n", page)
    assert shown
    assert error_of("finetune", *shown[1].split()) == shown[2]


def test_a_hint_of_the_commands_names_flags_of_each_command_that_prints_it() -> None:
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action.choices, dict)]
    printed = set()
    for command in ("generate", "chat", "eval", "export"):
        flags = set(subparsers.choices[command]._option_string_actions)
        for name in known_command_names():
            hint = command_hint(name, flags)
            if hint and f"--{name}" not in flags:
                printed.add(name)
                assert flags_in(hint).issubset(flags), (command, name)
    assert printed == set(known_command_names())
