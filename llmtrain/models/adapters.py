"""Load an adapter with its base model, or merge it into that."""

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import filelock
import torch
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import new_folder, read_hashed, read_object, write_json
from llmtrain.model_folders import is_of_checkpoint
from llmtrain.models.base_tensors import BASE_FILE, stored_base_tensors
from llmtrain.models.dtypes import check_range, stored_dtypes
from llmtrain.models.export import ModelFiles, copy_processor
from llmtrain.models.hub_models import load_causal_lm, local_folder, origin_of
from llmtrain.models.hub_safety import DATA_ONLY, refuse_pickles

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The file in a merged model's folder that identifies the adapter.
_MERGED_FROM = "merged_from.json"


def ignore_peft_warnings() -> None:
    """Ignore two warnings of peft that do not concern the user."""
    # The ranks of fused weights match no module, because they are the ranks of parameters.
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def merged_model(adapter: Path) -> str:
    """Merge an adapter into its base, unless that was done before.

    Args:
        adapter: the folder of the adapter.

    Returns:
        The folder of the merged model. For a run, that is ``merged`` in the run folder, where
        ``llmtrain export --merge`` writes it, too.

    Raises:
        UserError: if that folder holds something else, or if the adapter cannot be loaded.
    """
    target = merged_folder(adapter)
    # The processes of a machine come here at the same time.
    with filelock.FileLock(target.with_name(f".lock-{target.name}")):
        if not target.exists():
            with new_folder(target) as working:
                write_merged(adapter, working)
        elif read_object(target / _MERGED_FROM) != _identity_of(adapter):
            raise UserError(
                f"{target} exists and was not merged from {adapter}; delete it, or name a merged "
                "model."
            )
    say("merged", f"{adapter} is an adapter, so its merged model is used: {target}")
    return str(target)


def write_outline(adapter: Path, folder: Path) -> str:
    """Write a model folder with the shapes of the merged model, but with the weights of the base.

    It costs nothing, and is enough to plan a run. The files of the weights are symbolic links.

    Args:
        adapter: the folder of the adapter.
        folder: the folder to write, which exists.

    Returns:
        ``folder``.

    Raises:
        UserError: if the adapter, its base or its tokenizer cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        settings = read_object(adapter / "adapter_config.json")
        commit = read_object(adapter / BASE_FILE).get("commit") or "main"
        base = local_folder(str(settings.get("base_model_name_or_path")), commit)
        refuse_pickles(str(base))
        config = AutoConfig.from_pretrained(base, **DATA_ONLY)
        tokenizer = AutoTokenizer.from_pretrained(adapter, **DATA_ONLY)

    text_config = config.get_text_config()
    text_config.vocab_size = max(text_config.vocab_size, len(tokenizer))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)
    for weights in base.glob("*.safetensors*"):  # with the index of several files
        (folder / weights.name).symlink_to(weights.resolve())
    return str(folder)


def merged_folder(adapter: Path) -> Path:
    """Return where to write the merged model of an adapter."""
    if adapter.name != "model":
        return adapter.with_name(f"{adapter.name}-merged")
    if is_of_checkpoint(adapter):  # a checkpoint holds only the files of its manifest
        checkpoint = adapter.parent
        return checkpoint.parent.parent / f"merged-{checkpoint.name}"
    return adapter.with_name("merged")


def _identity_of(adapter: Path) -> dict[str, object]:
    """Identify an adapter by a hash of its weights."""
    return {**read_hashed(adapter / "adapter_model.safetensors")}


def write_merged(adapter: Path, folder: Path, dtype: str = "auto") -> None:
    """Merge an adapter into its base, and write the resulting model.

    They are merged in float32, and rounded once. Except for that it computes the same logits.

    Args:
        adapter: the folder of the adapter.
        folder: the folder to write.
        dtype: of the weights. ``auto`` stands for the dtypes in which the base is stored.

    Raises:
        UserError: if the adapter, its base or its tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    with as_user_error(f"{adapter}: no tokenizer could be loaded"):
        tokenizer = cast(
            "PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(adapter, **DATA_ONLY)
        )
    adapted = adapted_model(str(adapter), len(tokenizer), torch.float32)
    base = str(adapted.peft_config["default"].base_model_name_or_path)
    revision = read_object(adapter / BASE_FILE).get("commit") or "main"
    base_folder = local_folder(base, revision)
    merged: PreTrainedModel = adapted.merge_and_unload()

    files = ModelFiles(
        config=merged.config.to_dict(),
        tokenizer=tokenizer,
        trained_on="the data of its adapter",
        base=base,
        architecture=merged,
        base_tensors=stored_base_tensors(merged, [], base, revision, is_reward_model=False),
        base_dtypes=stored_dtypes(base_folder),
    ).finished(dtype)
    weights = files.export_tensors(merged)
    check_range(adapter, weights)
    # The names of these weights are those of published models already.
    merged.save_pretrained(folder, state_dict=weights, save_original_format=False)
    files.write(folder, merged.num_parameters())
    copy_processor(base_folder, folder)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)
    write_json(folder / _MERGED_FROM, _identity_of(adapter), durable=False)


def adapted_model(name: str, vocabulary: int, dtype: "torch.dtype | str" = "auto") -> "PeftModel":
    """Load an adapter with its base model.

    Args:
        name: the folder of the adapter.
        vocabulary: the number of tokens that need embeddings.
        dtype: of the base's weights. ``auto`` is the dtype in which they are stored.

    Raises:
        UserError: if the base is not the one that the adapter was trained on, if one of them cannot
            be loaded, or if the adapter is a pickle.
    """
    from peft import PeftConfig, PeftModel

    folder = Path(name)
    refuse_pickles(name)
    with as_user_error(f"{folder}: its adapter could not be loaded", first_line):
        base = str(PeftConfig.from_pretrained(name).base_model_name_or_path or "")
        if not base:
            raise UserError(
                f"{folder} does not name the model that it adapts; set base_model_name_or_path in "
                "adapter_config.json."
            )
        origin = {}
        if (folder / BASE_FILE).exists():
            origin = json.loads((folder / BASE_FILE).read_text())
        if "sha256" in origin and origin_of(base) != origin:
            raise UserError(
                f"{folder} is an adapter of other weights than {base} holds now; put those back."
            )

        model = load_causal_lm(base, dtype=dtype, revision=origin.get("commit") or "main")
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        if vocabulary > len(embeddings.weight):
            # The adapter has the rows of the new tokens.
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
        with warnings.catch_warnings():
            ignore_peft_warnings()
            return PeftModel.from_pretrained(model, name)
