"""What to write here instead of flags of other programs, and instead of their values.

Users of transformers' Trainer, TRL, axolotl and nanoGPT type the names that they know. If a recipe
does not have such a flag, or if a flag does not take such a value, the error message says what to
write.
"""

import difflib
import re
from collections.abc import Collection

from llmtrain.shipped import shipped_config

# Flags of `accelerate launch` that hints name. All other flags in a hint are the recipe's own.
LAUNCHER_FLAGS = frozenset(
    {"--mixed_precision", "--config_file", "--multi_gpu", "--num_processes", "--cpu"}
)

_BF16 = (
    "the launcher sets the precision, and bf16 is the default on GPUs that have it: accelerate "
    "launch --mixed_precision bf16 RECIPE"
)
_FP16 = "the launcher sets the precision: accelerate launch --mixed_precision fp16 RECIPE"
_DTYPE = (
    "trained weights are float32, and the launcher sets the precision of the computation: "
    "accelerate launch --mixed_precision bf16 RECIPE"
)
_CPU = "a GPU is used if there is one; the launcher chooses the CPU: accelerate launch --cpu RECIPE"
_FSDP = (
    f"the launcher shards a model: accelerate launch --config_file {shipped_config('fsdp2')} RECIPE"
)
_BEFORE_RECIPE = "this is a flag of the launcher, which goes before the recipe: accelerate launch"
_NOT_IN_GPT = "this recipe trains a new GPT of --n_layer blocks"
_LENGTH_IN_GPT = "use --block_size, the length of a row"
_PROMPTS_OF_ANSWERS = "leave it out: --loss_type compares answers, and prompts are not trained"
_FULL_ROWS = "leave it out: text always fills its rows, of --block_size tokens"
_LORA = "use --lora_r 16, the rank of the adapter"
_LORA_IN_GPT = f"{_NOT_IN_GPT}; recipes/finetune.py trains LoRA adapters"
_CHAT_IN_GPT = f"{_NOT_IN_GPT}; recipes/finetune.py trains on conversations"
_ATTENTION_IN_GPT = f"leave it out: {_NOT_IN_GPT}, whose attention is chosen for the device"
_OTHER_MODEL_IN_GPT = f"{_NOT_IN_GPT}; recipes/finetune.py starts from an existing model"
_NOT_SUPPORTED = "this is not supported; leave it out"
_IS_OFF = "leave it out: this is off by default"
_NO_VALUE = "leave it out: it has no value"
_NO_TRACKERS = "use --report_to none"
_NO_EVALUATIONS = "use --eval_steps 0, which turns evaluations off"

# The hints for each name. Of several hints, the first counts whose flags the recipe has. So a hint
# that is true of one recipe only names a flag of that recipe.
_HINTS: dict[str, tuple[str, ...]] = {}

# The same for the names of switches, if their value turns them off.
_OFF_HINTS: dict[str, tuple[str, ...]] = {}

_NULL_WORDS = frozenset({"null", "none", "~", ""})
_OFF_WORDS = _NULL_WORDS | {"false", "no", "off", "0"}

# The hints for the commands that use a model. The names are those of vLLM, llama.cpp, TRL and
# transformers.
_COMMAND_HINTS: dict[str, tuple[str, ...]] = {}

# The hint for each value in lower case, by the name of the flag that does not take it.
_VALUE_HINTS: dict[str, dict[str, str]] = {}


def hint_for(name: str, flags: Collection[str], value: str | None = None) -> str | None:
    """Return what to write instead of a flag, or instead of a value, that a recipe does not have.

    Args:
        name: the name of the flag, without dashes. If the recipe has this flag, the hint is about
            the value, which the flag does not take.
        flags: the flags of the recipe, such as ``--max_steps``.
        value: the value of the flag; ``None`` if it has none.

    Returns:
        ``None`` if nothing is known about that name or value.
    """
    is_known = f"--{name}" in flags
    for hint in _candidates(name, is_known, value):
        if flags_in(hint).issubset(flags):
            return hint

    if is_known or name in _HINTS:
        return None
    nearest = _nearest_name(name, flags)
    if nearest is None:
        return None
    hint_of_nearest = hint_for(nearest, flags, value)
    if hint_of_nearest is None:
        return None
    return f"if you mean {nearest}, {hint_of_nearest}"


def command_hint(name: str, flags: Collection[str]) -> str | None:
    """Return what to write instead of a flag that a command of ``llmtrain`` does not have.

    Args:
        name: the name of the flag, without dashes.
        flags: the flags of the command, such as ``--max_new_tokens``.

    Returns:
        ``None`` if nothing is known about that name.
    """
    for hint in _COMMAND_HINTS.get(name, ()):
        if flags_in(hint).issubset(flags):
            return hint
    return None


def _nearest_name(name: str, flags: Collection[str]) -> str | None:
    """Return the name with a hint that a misspelled name means.

    It is ``None`` if no name is near, or if a flag of the recipe is nearer.
    """
    known = [flag.removeprefix("--") for flag in flags]
    nearest = difflib.get_close_matches(name, [*known, *_HINTS], n=1, cutoff=0.9)
    return nearest[0] if nearest and nearest[0] not in known else None


def _candidates(name: str, is_known: bool, value: str | None) -> tuple[str, ...]:
    """Return the hints for a flag and its value, of which each recipe prints the first that fits.

    Args:
        name: the name of the flag.
        is_known: whether the recipe has the flag, and only the value is wrong.
        value: the value; ``None`` if there is none.
    """
    word = None if value is None else value.lower()
    if is_known:
        value_hint = _VALUE_HINTS.get(name, {}).get(word or "")
        return (value_hint,) if value_hint else ()

    # --no_wandb means the same as --wandb false.
    switch = name.removeprefix("no_")
    if name not in _HINTS and switch in _OFF_HINTS:
        return _OFF_HINTS[switch]

    hints = _HINTS.get(name, ())
    if word in _OFF_WORDS and name in _OFF_HINTS:
        return _OFF_HINTS[name] + hints
    # Any other flag without a value can be left out.
    if word in _NULL_WORDS and hints:
        return (_NO_VALUE,)
    return hints


def flags_in(hint: str) -> set[str]:
    """Return the flags in a hint, except for those of the launcher."""
    return set(re.findall(r"--\w+", hint)) - LAUNCHER_FLAGS


def known_names() -> list[str]:
    """Return all names that have a hint."""
    return list(_HINTS)


def known_command_names() -> list[str]:
    """Return all names that have a hint for commands."""
    return list(_COMMAND_HINTS)


def known_values() -> list[tuple[str, str]]:
    """Return all values that have a hint, each after the name of its flag."""
    return [(name, value) for name, hints in _VALUE_HINTS.items() for value in hints]


def _add(names: str, *hints: str, off: str | tuple[str, ...] = ()) -> None:
    """Add the hints for several names.

    Args:
        names: the names, separated by spaces.
        hints: what to write instead, for each kind of recipe.
        off: the same for a value that turns the flag off. By default, that of all values.
    """
    off_hints = (off,) if isinstance(off, str) else off
    for name in names.split():
        assert name not in _HINTS, name
        _HINTS[name] = hints
        if off_hints:
            _OFF_HINTS[name] = off_hints


def _add_for_commands(names: str, *hints: str) -> None:
    """Add the hints of the commands for several names, which are separated by spaces."""
    for name in names.split():
        assert name not in _COMMAND_HINTS, name
        _COMMAND_HINTS[name] = hints


def _add_values(name: str, values: str, hint: str) -> None:
    """Add the hint for several values of a flag, which are separated by spaces."""
    hints = _VALUE_HINTS.setdefault(name, {})
    for value in values.split():
        assert value not in hints, (name, value)
        hints[value] = hint


# --- the data

_add("train_file train_files training_file train_data data_path data_files", "use --dataset FILE")
_add(
    "dataset_name dataset_id datasets train_dataset dataset_path",
    "use --dataset, with a file, a folder or a name on the hub",
)
_add("pretraining_dataset", "use --dataset, with text or a data set that has a field of text")
_add(
    "streaming dataset_streaming",
    "leave it out: a data set is tokenised once, and its rows are then read from disk",
    off=_IS_OFF,
)
_add(
    "max_train_samples max_samples",
    "use a smaller --dataset, or --max_steps to train on fewer rows",
)
_add(
    "shuffle shuffle_dataset shuffle_merged_datasets",
    "leave it out: rows are shuffled by --seed, and those of several data sets together",
    off="this is not supported: rows are shuffled by --seed",
)
_add("cache_dir", "set HF_HOME in the environment for downloads, or LLMTRAIN_CACHE for rows")
_add("overwrite_cache", "leave it out: changed data are tokenised again")
_add("dataset_kwargs tokenizer_config", _NOT_SUPPORTED)
_add(
    "dataset_config dataset_config_name dataset_configuration subset",
    "use --dataset NAME:CONFIGURATION",
)
_add(
    "validation_file validation_files eval_file test_file val_file valid_file test_datasets "
    "validation_dataset val_dataset",
    "use --eval_dataset FILE",
)
_add(
    "val_set_size validation_split_percentage validation_split test_size eval_split_ratio",
    "use --eval_fraction, such as 0.05",
)
_add("train_split dataset_split split", "use --dataset_train_split")
_add("eval_split test_split", "use --dataset_test_split")
_add("dataset_text_field text_column text_column_name", "use --text_field NAME")
_add(
    "dataset_weights probs interleave_probs dataset_mixer",
    "use --mixture, with a weight for each data set",
)
_add(
    "tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_type tokenizer_dir",
    "use --tokenizer",
)
_add("use_fast_tokenizer", "leave it out: --tokenizer is always a fast tokenizer")
_SPECIAL_TOKENS = "leave it out: the special tokens are those of --tokenizer"
_add(
    "special_tokens tokens eos_token bos_token pad_token",
    f"{_SPECIAL_TOKENS} and of --chat_template",
    _SPECIAL_TOKENS,
)
_add(
    "vocab_size",
    "use --tokenizer; by default, the vocabulary is that of --model_name_or_path",
    "use --tokenizer bpe:8192, which trains a tokenizer with a vocabulary of that size",
)
_add(
    "preprocessing_num_workers dataset_processes num_proc",
    "use --dataset_num_proc",
    "leave it out: text is tokenised on all CPU cores",
)
_add("dataset_num_proc", "leave it out: text is tokenised on all CPU cores")
_add(
    "dataloader_num_workers num_workers dataloader_pin_memory dataloader_prefetch_factor "
    "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order",
    "leave it out: the next batch is read while the current one is computed",
)
_add("dataloader_drop_last", "leave it out: no rows are left out at the end of an epoch")
_add("dataset_prepared_path", "leave it out: rows are kept in the folder that LLMTRAIN_CACHE names")
_add(
    "remove_unused_columns",
    "leave it out: other fields are not read; --columns renames those that are",
)

# --- lengths and packing

_add(
    "max_seq_length max_seq_len sequence_len seq_length seq_len sequence_length model_max_length "
    "context_length cutoff_len max_position_embeddings",
    _LENGTH_IN_GPT,
    "use --max_length",
)
_add(
    "max_prompt_length max_completion_length max_target_length max_source_length",
    _LENGTH_IN_GPT,
    "use --max_length, which limits a prompt together with its answer",
)
_add(
    "truncation_mode truncation excess_length_strategy",
    "use --overlong truncate, which keeps the beginning; by default, what is longer than "
    "--max_length is left out",
    _FULL_ROWS,
)
_add(
    "pad_to_sequence_len pad_to_multiple_of",
    "leave it out: packed rows are full, and those of --no_packing are padded to a few lengths",
    _FULL_ROWS,
)
_add(
    "sample_packing pack_samples padding_free packing_strategy",
    "use --packing or --no_packing; by default, rows are packed if the model keeps packed "
    "documents apart",
    _FULL_ROWS,
    off=("use --no_packing, which puts each conversation into a row of its own", _FULL_ROWS),
)
_add(
    "eval_packing eval_sample_packing",
    "leave it out: --packing and --no_packing are for the eval rows, too",
    _FULL_ROWS,
)
_add("packing no_packing", _FULL_ROWS)
_add(
    "group_by_length length_column_name train_sampling_strategy",
    "leave it out: rows are packed, and with --no_packing those of similar length are put together",
    "leave it out: all rows of text have --block_size tokens",
)

# --- conversations

_add(
    "assistant_only_loss",
    "leave it out: only the assistant's turns are trained; --turns last trains those after the "
    "last user message",
    _PROMPTS_OF_ANSWERS,
    _CHAT_IN_GPT,
    off=(
        "this is not supported: of conversations, only the assistant's turns are trained; "
        "--turns chooses which",
        _PROMPTS_OF_ANSWERS,
        _CHAT_IN_GPT,
    ),
)
_add(
    "completion_only_loss train_on_prompt mask_prompt response_template instruction_template",
    "leave it out: of prompts with completions, only the completion is trained, and of "
    "conversations those turns of the assistant that --turns chooses",
    _PROMPTS_OF_ANSWERS,
    _CHAT_IN_GPT,
)
_add(
    "train_on_inputs",
    "leave it out: prompts are not trained; --turns chooses the turns of the assistant that are",
    _PROMPTS_OF_ANSWERS,
    _CHAT_IN_GPT,
)
_add("roles_to_train train_on_last_turn", "use --turns all or --turns last")
_add(
    "chat_template_path chat_template_jinja template",
    "use --chat_template, with chatml or the path of a Jinja file",
    _CHAT_IN_GPT,
)
_add("chat_template turns overlong", _CHAT_IN_GPT)
_add("dataset_format conversation_format", "use --format")
_add(
    "default_system_message",
    "this is not supported; write it in the file of --chat_template",
    _CHAT_IN_GPT,
)

# --- the model

_add(
    "model base_model model_path model_name model_id pretrained_model_name_or_path "
    "initial_checkpoint_dir",
    "use --model_name_or_path",
    _OTHER_MODEL_IN_GPT,
)
_add(
    "model_name_or_path from_config config_overrides trust_remote_code router_aux_loss_coef",
    _OTHER_MODEL_IN_GPT,
)
_add(
    "model_revision revision",
    "this is not supported; download that revision, and name its folder in --model_name_or_path",
    _OTHER_MODEL_IN_GPT,
)
_add(
    "model_init_kwargs",
    "use the flags of the model, such as --attn_implementation and --trust_remote_code",
    _OTHER_MODEL_IN_GPT,
)
_add(
    "low_cpu_mem_usage device_map",
    "leave it out: the launcher gives each process its device, and shards a model if its config "
    "says so",
)
_add(
    "bias",
    "leave it out: --architecture gpt2 has biases, and lfm2 has none",
    "leave it out: the configuration of the model says whether it has biases",
)
_add(
    "dropout disable_dropout",
    "use --lora_dropout for the dropout of an adapter; that of the model is in its configuration",
    "use --dropout",
    off="leave it out: the dropout of the model is in its configuration",
)
_add(
    "tie_embeddings tie_word_embeddings",
    'with --from_config, use --config_overrides "tie_word_embeddings=True"; an existing model '
    "keeps its own",
    "leave it out: --architecture decides",
)
_add(
    "config_name model_type model_config",
    "to start from random weights, use --from_config, such as llama or qwen3",
    "use --architecture",
)
_add(
    "init_from",
    "use --model_name_or_path; a run that is not finished resumes by itself",
    f"{_OTHER_MODEL_IN_GPT}; a run that is not finished resumes by itself",
)
_add(
    "bf16 bf16_full_eval",
    _BF16,
    off="the launcher sets the precision, and bf16 is the default on GPUs that have it; for "
    "float32: accelerate launch --mixed_precision no RECIPE",
)
_add(
    "fp16 fp16_full_eval half_precision_backend",
    _FP16,
    off="leave it out: the launcher sets the precision, and fp16 is only used on GPUs without bf16",
)
_add("dtype torch_dtype model_dtype precision", _DTYPE)
_add(
    "tf32",
    "leave it out: on a GPU, float32 products are computed in TF32, except with --bitwise",
    off="TF32 cannot be turned off, except with --bitwise",
)
_add("device use_cpu no_cuda", _CPU, off="leave it out: a GPU is used if there is one")
_LAYERS = (
    'with --from_config, use --config_overrides "num_hidden_layers=8"; the layers of an existing '
    "model are fixed"
)
_add("n_layer n_layers", _LAYERS)
_add("num_layers num_hidden_layers", _LAYERS, "use --n_layer")
_add(
    "n_head n_heads num_heads num_attention_heads",
    'with --from_config, use --config_overrides "num_attention_heads=8"; the heads of an existing '
    "model are fixed",
    "use --n_head",
)
_add(
    "n_embd n_embed d_model hidden_size embed_dim dim",
    'with --from_config, use --config_overrides "hidden_size=512"; the width of an existing model '
    "is fixed",
    "use --n_embd",
)
_add(
    "attn use_flash_attention_2 use_flash_attention flash_attention flash_attn attention",
    "use --attn_implementation flash_attention_2",
    _ATTENTION_IN_GPT,
    off=_IS_OFF,
)
for _name, _implementation in {
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}.items():
    _add(
        _name,
        f"use --attn_implementation {_implementation}",
        _ATTENTION_IN_GPT,
        off=_IS_OFF,
    )
_add(
    "xformers_attention s2_attention",
    "this is not supported; see --attn_implementation",
    _NOT_SUPPORTED,
    off=_IS_OFF,
)
_add("attn_implementation", _ATTENTION_IN_GPT)
_add(
    "activation_checkpointing use_gradient_checkpointing",
    "use --gradient_checkpointing",
    off="leave it out: --gradient_checkpointing is off by default",
)
_add(
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    "leave it out: --gradient_checkpointing uses the variant that is not reentrant",
)
_add(
    "activation_offloading torch_empty_cache_steps",
    "this is not supported; use --gradient_checkpointing to save memory",
    off=_IS_OFF,
)
_add(
    "compile torch_compile_backend torch_compile_mode",
    "use --torch_compile auto, always or never",
    off="use --torch_compile never",
)
_add(
    "use_liger_kernel liger_kernel use_liger liger_kernel_config cut_cross_entropy "
    "liger_fused_linear_cross_entropy flash_attn_cross_entropy",
    "leave it out: the loss does not hold the logits of a long vocabulary",
)
_add(
    "liger_rope liger_rms_norm liger_glu_activation flash_attn_rms_norm flash_attn_fuse_qkv "
    "flash_attn_fuse_mlp",
    "leave it out: --torch_compile fuses such operations",
)
_add(
    "unfrozen_parameters",
    "use --freeze, a regular expression for the parameters that are not trained",
    _NOT_SUPPORTED,
)

# --- LoRA and quantised weights

_add("use_peft use_lora lora peft peft_config", _LORA, _LORA_IN_GPT, off=_IS_OFF)
_add("lora_rank peft_r r", _LORA, _LORA_IN_GPT)
_add("lora_r lora_alpha lora_target_modules lora_dropout", _LORA_IN_GPT, off=_IS_OFF)
_add(
    "adapter finetuning_type",
    "use --lora_r 16 for LoRA, and --load_in_4bit as well for QLoRA",
    _LORA_IN_GPT,
    off=_IS_OFF,
)
_add("qlora use_qlora quantize", "use --lora_r 16 with --load_in_4bit", _LORA_IN_GPT, off=_IS_OFF)
_add(
    "lora_modules lora_target_module lora_query lora_key lora_value lora_projection lora_mlp "
    "lora_head",
    "use --lora_target_modules",
    _LORA_IN_GPT,
    off=("use --lora_target_modules with the names of the others", _IS_OFF),
)
_add(
    "lora_modules_to_save modules_to_save lora_target_parameters lora_fan_in_fan_out "
    "loraplus_lr_ratio relora_steps",
    _NOT_SUPPORTED,
)
_add("lora_task_type", "leave it out: the recipe knows what it trains")
_add(
    "use_rslora peft_use_rslora",
    "this is not supported; for the same scale, multiply --lora_alpha by the square root of "
    "--lora_r",
    _LORA_IN_GPT,
    off=_IS_OFF,
)
_add(
    "lora_model_dir",
    "use --model_name_or_path with the folder of the adapter, which is merged into its base",
    _OTHER_MODEL_IN_GPT,
)
_add(
    "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage "
    "bnb_4bit_use_double_quant use_bnb_nested_quant bnb_config_kwargs",
    "leave it out: --load_in_4bit uses NF4 with double quantisation, and computes in bf16",
    _LORA_IN_GPT,
)
_add(
    "lora_target_linear",
    "leave it out: --lora_target_modules is all-linear by default",
    _LORA_IN_GPT,
    off=("use --lora_target_modules with names such as q_proj; all-linear is the default", _IS_OFF),
)
_add(
    "load_in_8bit gptq",
    "this is not supported; use --load_in_4bit with --lora_r 16",
    _LORA_IN_GPT,
    off=_IS_OFF,
)
_add("load_in_4bit use_dora", _LORA_IN_GPT, off=_IS_OFF)
_add("peft_use_dora", "use --use_dora", _LORA_IN_GPT, off=_IS_OFF)

# --- batches

_add(
    "batch_size train_batch_size total_batch_size",
    "use --global_batch_size, the rows of a step over all processes; "
    "--per_device_train_batch_size only limits memory",
)
_add(
    "micro_batch_size per_device_batch_size device_batch_size per_gpu_train_batch_size",
    "use --per_device_train_batch_size, which only limits memory; --global_batch_size sets the "
    "rows of a step",
)
_add(
    "gradient_accumulation_steps grad_accum_steps accumulation_steps",
    "leave it out: it follows from --global_batch_size, --per_device_train_batch_size and the "
    "number of processes",
)
_add(
    "per_device_eval_batch_size eval_batch_size eval_accumulation_steps per_gpu_eval_batch_size",
    "leave it out: evaluations use --per_device_train_batch_size, too",
)
_add(
    "split_batches accelerator_config",
    "leave it out: --global_batch_size is divided among the processes",
)
_add("average_tokens_across_devices", "leave it out: the loss is averaged over all processes")
_add("auto_find_batch_size", "use --per_device_train_batch_size, and half of it if memory runs out")

# --- steps and the optimizer

_add(
    "num_epochs epochs n_epochs max_epochs num_train_epochs",
    "use --num_train_epochs",
    "use --max_steps",
)
_add(
    "max_iters max_train_steps num_train_steps num_steps total_steps train_steps steps n_steps "
    "max_tokens",
    "use --max_steps",
)
_add("lr max_lr peak_lr", "use --learning_rate")
_add(
    "lr_scheduler lr_schedule learning_rate_schedule learning_rate_scheduler scheduler "
    "scheduler_type lr_decay_style",
    "use --lr_scheduler_type",
)
_add(
    "decay_lr",
    "leave it out: --lr_scheduler_type chooses how the learning rate falls",
    off="use --lr_scheduler_type constant",
)
_add(
    "min_lr cosine_min_lr_ratio cosine_constant_lr_ratio lr_decay_iters lr_scheduler_kwargs "
    "lr_decay_steps",
    "use --lr_scheduler_type: all schedules but constant end at 0 with the last step",
)
_add(
    "warmup_ratio lr_warmup_fraction",
    "use --warmup_steps, which may be a fraction of the run: --warmup_steps 0.1",
)
_add("warmup_iters warmup num_warmup_steps lr_warmup_steps", "use --warmup_steps")
_add("optimizer optim_type optimizer_type", "use --optim adamw or --optim muon")
_add("grad_clip gradient_clipping clip_grad_norm max_norm gradient_clip_val", "use --max_grad_norm")
_add("beta1", "use --adam_beta1")
_add("beta2", "use --adam_beta2")
_add("wd", "use --weight_decay")
_add("data_seed random_seed shuffle_seed", "use --seed, which also sets the order of the rows")
_add("adafactor", "this optimizer is not supported; use --optim adamw", off=_IS_OFF)
_add(
    "neftune_noise_alpha adam_epsilon optim_args optim_target_modules label_smoothing_factor "
    "plugins trl",
    _NOT_SUPPORTED,
)
_add("use_cache", "leave it out: training needs no cache of keys and values")
_add(
    "full_determinism",
    "use --bitwise, which adds gradients in a fixed order",
    off=_IS_OFF,
)

# --- evaluation and logging

_add(
    "eval_strategy evaluation_strategy evals_per_epoch",
    "use --eval_steps N; 0 turns evaluations off",
    off=_NO_EVALUATIONS,
)
_add(
    "eval_on_start eval_delay initial_validation final_validation",
    "leave it out: there is an evaluation before the first step, after the last, and every "
    "--eval_steps steps",
)
_add("eval_interval eval_every eval_freq", "use --eval_steps")
_add(
    "eval_iters eval_max_batches max_eval_samples",
    "leave it out: all eval data are evaluated; for fewer, use a smaller --eval_fraction",
)
_add(
    "eval_only",
    "leave it out: the recipe trains; the command llmtrain eval scores a finished run",
    off=_IS_OFF,
)
_add(
    "prediction_loss_only include_for_metrics batch_eval_metrics eval_do_concat_batches "
    "eval_use_gather_object label_names",
    "leave it out: an evaluation computes its own metrics; --metric_for_best_model chooses one",
)
_add(
    "start num_samples max_new_tokens eval_max_new_tokens eval_table_size",
    "use --sample_prompts to see what the model writes at each evaluation; the command llmtrain "
    "generate continues a prompt",
)
_add("profiler_steps", "use --xray_steps 6:8, which records a timeline of these steps")
_add(
    "loss_watchdog_threshold loss_watchdog_patience logging_nan_inf_filter",
    "leave it out: --skip_nonfinite says how many steps with a NaN or infinite gradient are "
    "skipped before the run stops",
)
_add(
    "debug",
    "use --dry_run to print the first rows; LLMTRAIN_DEBUG=1 in the environment prints the "
    "traceback of an error",
    off=_IS_OFF,
)
_add("strict", "leave it out: a flag or key that the recipe does not have is always an error")
_add("skip_memory_metrics", "leave it out: each log entry has the memory in use")
_add(
    "include_num_input_tokens_seen",
    "leave it out: each log entry has the number of tokens trained so far",
)
_add(
    "log_level log_level_replica log_on_each_node",
    "leave it out: only the first process prints the log",
)
_add("disable_tqdm", "leave it out: a log file has no progress bars")
_add(
    "do_eval",
    "leave it out: the run evaluates every --eval_steps steps",
    off=_NO_EVALUATIONS,
)
_add(
    "do_train",
    "leave it out: the recipe trains, unless you give --dry_run",
    off="use --dry_run, which stops before the first step",
)
_add(
    "do_predict",
    "leave it out, and use --sample_prompts to see what the model writes",
    off=_IS_OFF,
)
_add(
    "logging_strategy log_interval log_every log_every_n_steps log_freq",
    "use --logging_steps",
    off="use a --logging_steps as large as --max_steps; the last step is always logged",
)
_add(
    "logging_first_step",
    "use --logging_steps 1, which logs every step",
    off="leave it out: the first step is only logged with --logging_steps 1",
)
_add(
    "logging_dir tensorboard_dir log_dir",
    "leave it out: --report_to tensorboard writes to the run folder",
)
for _name, _variable in {
    "wandb_project": "WANDB_PROJECT",
    "project": "WANDB_PROJECT",
    "wandb_entity": "WANDB_ENTITY",
    "wandb_mode": "WANDB_MODE",
}.items():
    _add(_name, f"set {_variable} in the environment; see also --report_to")
_add(
    "wandb_log_model",
    "set WANDB_LOG_MODEL=end or checkpoint in the environment; see also --report_to",
    off=_IS_OFF,
)
_add(
    "wandb_watch",
    "leave it out: the norms of weights and gradients are logged every --logging_steps steps",
    off=_IS_OFF,
)
_add("wandb_run_id", "leave it out: a run that resumes continues its W&B run; see --run_name")
_add("logger_name", "use --report_to, such as --report_to tensorboard", off=_NO_TRACKERS)
_add("use_mlflow", "use --report_to mlflow", off=_IS_OFF)
_add("use_comet", "use --report_to comet_ml", off=_IS_OFF)
for _name, _variable in {
    "mlflow_tracking_uri": "MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME",
    "trackio_space_id": "TRACKIO_SPACE_ID",
    "trackio_bucket_id": "TRACKIO_BUCKET_ID",
    "trackio_static_space_id": "TRACKIO_SPACE_ID",
}.items():
    _add(_name, f"set {_variable} in the environment; see also --report_to", off=_IS_OFF)
_add(
    "comet_project_name",
    "set WANDB_PROJECT in the environment, which names the project at every tracker",
    off=_IS_OFF,
)
_add(
    "wandb_log wandb use_wandb with_tracking",
    "leave it out: --report_to is wandb by default",
    off=_NO_TRACKERS,
)
_add("wandb_name wandb_run_name exp_name experiment_name", "use --run_name")
_add(
    "use_tensorboard tensorboard",
    "use --report_to tensorboard",
    off="leave it out: --report_to is wandb by default; none turns it off",
)
_add(
    "early_stopping",
    "use --early_stopping_patience 3",
    off="leave it out: --early_stopping_patience is 0 by default",
)
_add(
    "greater_is_better",
    "leave it out: the name of --metric_for_best_model decides; a loss, perplexity or bits are "
    "better if they are lower, all else if it is higher",
)

# --- the run folder

_add("out_dir output output_path save_dir checkpoint_dir out", "use --output_dir")
_add(
    "overwrite_output_dir",
    "leave it out: no run is overwritten; --resume_from_checkpoint never starts a new one beside "
    "it",
)
_add(
    "resume resume_from auto_resume_from_checkpoints resume_checkpoint",
    "leave it out: the same command resumes a run that is not finished; "
    "--resume_from_checkpoint names another one",
    off="use --resume_from_checkpoint never, which starts a new run",
)
_add(
    "save_strategy saves_per_epoch",
    "use --save_steps; there is always a checkpoint after the last step",
    off="use a --save_steps as large as --max_steps; there is always a checkpoint after the last "
    "step",
)
_add(
    "always_save_checkpoint",
    "use --save_steps; there is always a checkpoint after the last step",
    off="use --load_best_model_at_end, which keeps the weights of the best evaluation",
)
_add(
    "save_only_model",
    "this is not supported: a checkpoint always has the state of the optimizer; see "
    "--save_total_limit",
    off=_IS_OFF,
)
_add("save_on_each_node", "leave it out: all machines share --output_dir")
_add("enable_jit_checkpoint", "leave it out: a run that gets SIGTERM saves a checkpoint first")
_add(
    "ignore_data_skip restore_callback_states_from_checkpoint",
    "leave it out: a run resumes with its whole state, and with the rows that come next",
)
_add("save_interval save_every save_freq checkpointing_steps", "use --save_steps")
_add("save_safetensors", "leave it out: weights are always saved as safetensors; see --save_steps")
_add(
    "hub_model_id hub_repo_id push_to_hub_model_id repo_id hub_repo", "use --push_to_hub NAME/MODEL"
)
_add("hub_token", "set HF_TOKEN in the environment; --push_to_hub NAME/MODEL uploads the model")
_add("token access_token use_auth_token hf_use_auth_token", "set HF_TOKEN in the environment")
_add(
    "hub_private_repo",
    "leave it out: a new repository of --push_to_hub is private",
    off="leave it out: a new repository of --push_to_hub is private, and the hub can make it "
    "public afterwards",
)
_add("hub_revision", "this is not supported; --push_to_hub uploads to the branch main")
_add("hub_strategy hub_always_push", "leave it out: --push_to_hub uploads the finished model")

# --- processes

_NOT_SHARDED = "leave it out: a model is sharded only if the launcher is told to"
_add("fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap dp_shard_size", _FSDP, off=_NOT_SHARDED)
_add(
    "deepspeed deepspeed_config zero_stage",
    f"DeepSpeed is not supported; {_FSDP}",
    off=_NOT_SHARDED,
)
_add(
    "ddp_find_unused_parameters ddp_static_graph ddp_broadcast_buffers ignore_bias_buffers",
    "leave it out; --ddp_timeout and --ddp_bucket_cap_mb are the settings of DDP here",
)
_add(
    "ddp",
    "leave it out: several processes of the launcher train with DDP",
    off="leave it out: a single process trains without DDP",
)
_add("backend ddp_backend", "leave it out: GPUs communicate over NCCL, and CPUs over Gloo")
_add("sequence_parallel_degree context_parallel_size", _NOT_SUPPORTED)
_add(
    "tensor_parallel_size parallelism_config",
    "the launcher's config has the parallel layout: accelerate launch --config_file "
    f"{shipped_config('fsdp2')} RECIPE",
)
_add("mixed_precision", f"{_BEFORE_RECIPE} --mixed_precision bf16 RECIPE")
_add(
    "num_processes num_gpus n_gpus gpus devices nproc_per_node",
    f"{_BEFORE_RECIPE} --multi_gpu --num_processes 2 RECIPE",
)
_add(
    "num_machines nnodes num_nodes",
    "start the launcher on each machine: accelerate launch --config_file "
    f"{shipped_config('multi_node')} RECIPE",
)
_add(
    "config_file",
    "use --config FILE for settings of the recipe; a config of accelerate goes before the recipe: "
    "accelerate launch --config_file FILE RECIPE",
)
_add("local_rank", "leave it out: the launcher sets it in the environment")

# --- preferences

_PREFERENCE_RECIPE = "this is a setting of recipes/preference.py; leave it out"
_add(
    "beta loss_type label_smoothing simpo_gamma desirable_weight undesirable_weight share_prompts",
    _PREFERENCE_RECIPE,
)
_add("dpo_beta kto_beta pref_beta orpo_alpha rl_beta", "use --beta", _PREFERENCE_RECIPE)
_add("simpo_margin gamma", "use --simpo_gamma", _PREFERENCE_RECIPE)
_add("gamma_beta_ratio", "use --simpo_gamma, which is the ratio times --beta", _PREFERENCE_RECIPE)
_add(
    "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau "
    "ref_model_mixup_alpha ref_model_sync_steps center_rewards_coefficient",
    _NOT_SUPPORTED,
)
_add("cpo_alpha rpo_alpha", "this is not supported; see --loss_type", _PREFERENCE_RECIPE)
_add(
    "pref_loss rl dpo_loss",
    "use --loss_type; sigmoid, the default, is DPO",
    _PREFERENCE_RECIPE,
)
_add(
    "ref_model ref_model_name_or_path reference_model model_ref sync_ref_model",
    "leave it out: the reference in --loss_type is the model with its initial weights",
    _PREFERENCE_RECIPE,
)
_add(
    "precompute_ref_log_probs precompute_ref_batch_size",
    "leave it out: if --loss_type needs the log-probabilities of the reference model, they are "
    "computed once, before the first step",
    _PREFERENCE_RECIPE,
)

# --- values of other programs

_add_values(
    "optim",
    "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla "
    "adamw_torch_npu_fused adamw_anyprecision fused_adamw",
    "use adamw",
)
_add_values(
    "optim",
    "adamw_8bit adamw_bnb_8bit paged_adamw paged_adamw_32bit paged_adamw_8bit adamw_torch_8bit "
    "adamw_torch_4bit ademamix_8bit paged_ademamix_8bit lion_8bit paged_lion_8bit paged_lion_32bit",
    "optimizers with 8 bits or pages are not supported; use adamw",
)
_add_values(
    "optim",
    "adafactor sgd adagrad rmsprop lion lion_32bit ademamix galore_adamw galore_adamw_8bit "
    "apollo_adamw lomo adalomo grokadamw schedule_free_adamw schedule_free_radam schedule_free_sgd "
    "stable_adamw shampoo soap sophia lamb",
    "this optimizer is not supported; use adamw",
)
_add_values(
    "lr_scheduler_type",
    "constant_with_warmup",
    "use constant, which has the warmup of --warmup_steps",
)
_add_values(
    "lr_scheduler_type",
    "wsd trapezoid trapezoidal warmup_stable",
    "use warmup_stable_decay",
)
_add_values(
    "lr_scheduler_type",
    "cosine_with_min_lr cosine_with_restarts cosine_warmup_with_min_lr cosine_annealing "
    "cosine_with_warmup one_cycle",
    "use cosine, which falls once, from the peak to 0",
)
_add_values(
    "lr_scheduler_type",
    "linear_with_warmup polynomial",
    "use linear, which falls to 0 after the warmup of --warmup_steps",
)
_add_values(
    "lr_scheduler_type",
    "inverse_sqrt rex exponential step",
    "this schedule is not supported; cosine and linear fall to 0, and warmup_stable_decay falls at "
    "the end only",
)
_add_values(
    "lr_scheduler_type",
    "reduce_lr_on_plateau greedy",
    "no schedule follows the eval loss here; use constant, with --early_stopping_patience",
)
_add_values("loss_type", "dpo", "use sigmoid, which is the loss of DPO")
_add_values("loss_type", "cdpo", "use sigmoid with --label_smoothing 0.1")
_add_values("loss_type", "rdpo robust_dpo", "use robust with --label_smoothing 0.1")
_add_values("loss_type", "kto_pair", "use kto, which trains on single answers with a label")
_add_values("loss_type", "rm reward_model bradley_terry", "use reward")
_add_values(
    "loss_type",
    "hinge exo_pair nca_pair bco bco_pair sppo sppo_hard aot aot_pair aot_unpaired apo_zero "
    "apo_down apo_zero_unpaired discopop sft sigmoid_norm alphapo",
    "this loss is not supported; sigmoid is the loss of DPO",
)
_add_values("torch_compile", "true yes on 1", "use always, or auto to compile a long run on a GPU")
_add_values("torch_compile", "false no off 0", "use never")
_add_values(
    "overlong",
    "keep_start truncation truncate_right",
    "use truncate, which keeps the beginning",
)
_add_values(
    "overlong",
    "keep_end truncate_left",
    "the end cannot be kept; use truncate, which keeps the beginning, or drop",
)
_add_values("overlong", "raise", "use error")
_add_values(
    "format",
    "chat chatml conversational conversation openai chat_template",
    "use messages, or auto",
)
_add_values("format", "instruction", "use alpaca")
_add_values("format", "prompt-completion", "use prompt_completion")
_add_values("format", "completion language_modeling", "use text, which trains every token")
_add_values("turns", "last_turn", "use last")
_add_values("turns", "assistant", "use all: only the assistant's turns are trained")
_add_values("architecture", "gpt nanogpt", "use gpt2")
_add_values(
    "architecture",
    "llama mistral qwen2 qwen3 gemma phi smollm",
    "use lfm2; recipes/finetune.py trains other architectures from random weights",
)
_add_values("ddp_comm_hook", "no", "use none")
_add_values(
    "ddp_comm_hook", "powersgd power_sgd batched_power_sgd", "PowerSGD is not supported; use bf16"
)

# --- commands that use a model

_add_for_commands(
    "model m model_name_or_path model_name model_path pretrained ckpt checkpoint run out_dir",
    "leave out the flag: the run or the model comes without one, such as runs/gpt",
)
_add_for_commands(
    "p start text input_text", "use --prompt TEXT", "type it: each line of the input is a message"
)
_add_for_commands(
    "f file i input input_file prompts prompts_file dataset dataset_name data",
    "use --prompt_file FILE, with a prompt on each line",
)
_add_for_commands(
    "n n_predict max_tokens max_length max_gen_len num_tokens length max_completion_length",
    "use --max_new_tokens N",
)
_add_for_commands("temp t", "use --temperature T")
_add_for_commands("s", "use --seed S")
_add_for_commands("topk k", "use --top_k K")
_add_for_commands(
    "top_p min_p repetition_penalty repeat_penalty num_beams typical_p",
    "this is not supported: tokens are sampled with --temperature and --top_k; vllm and llama.cpp "
    "have more",
)
_add_for_commands(
    "do_sample greedy", "use --temperature 0 for the likeliest token, above 0 to sample"
)
_add_for_commands(
    "num_samples num_return_sequences best_of", "run it again with another --seed for another text"
)
_add_for_commands("sys system_prompt system_message sp", "use --system TEXT")
_add_for_commands("enable_thinking reasoning", "use --no_thinking for answers without reasoning")
_add_for_commands(
    "o output output_file output_path output_dir out",
    "use --to FOLDER",
    "use --json, and redirect the output: > FILE",
)
_add_for_commands("task", "use --tasks TASK")
_add_for_commands("fewshot n_shot num_shots", "use --num_fewshot N")
_add_for_commands("merge_and_unload merge_lora", "use --merge")
_add_for_commands("chat_template", "use --apply_chat_template")
_add_for_commands(
    "device cuda gpu n_gpu_layers ngl tensor_parallel_size",
    "leave it out: a GPU is used if there is one",
)
_add_for_commands(
    "dtype torch_dtype bf16 fp16 load_in_8bit load_in_4bit quantization",
    "leave it out: the model keeps the precision that it was saved in",
)
