"""Train a stored adapter further, instead of a new one."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.model_folders import ADAPTER_WEIGHTS, vocabulary_of
from llmtrain.models.adapters import ignore_peft_warnings
from llmtrain.models.dtypes import cast_weights
from llmtrain.models.lora import set_base

if TYPE_CHECKING:
    import peft
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def tokens_of_adapter(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast | None",
    new_tokens: Sequence[int],
) -> list[int]:
    """Return the tokens that an adapter has embeddings for, and its base has not.

    Args:
        model: the base model.
        tokenizer: the adapter's.
        new_tokens: tokens that a chat template has added to it.

    Raises:
        UserError: if a chat template has added more tokens.
    """
    if new_tokens:
        raise UserError(
            "--continue_adapter: the chat template has tokens that the adapter has no rows for; "
            "leave --chat_template out, or merge the adapter with llmtrain export --merge."
        )
    if tokenizer is None:
        return []
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    return [*range(len(embeddings.weight), vocabulary_of(tokenizer))]


def load_lora(
    model: "PreTrainedModel",
    adapter: Path,
    base: str,
    new_tokens: Sequence[int],
    is_reward_model: bool = False,
    base_commit: str | None = None,
) -> "PeftModel":
    """Add a stored adapter to a model, in place, to train it further, and freeze everything else.

    The adapter's settings stay. Its tensors become the initial values, in float32, and are real
    also if the model is on the meta device.

    Args:
        model: the base model.
        adapter: the folder of the adapter.
        base: the folder or hub name of the base's weights.
        new_tokens: tokens that the base has no embeddings for. The adapter must have them.
        is_reward_model: whether the model scores answers.
        base_commit: the commit of the base on the hub, for peft; ``None`` for a folder.

    Returns:
        peft's view of the model, which can save the adapter.

    Raises:
        UserError: if this is no LoRA adapter, or if it does not fit the model.
    """
    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        import peft
        from safetensors.torch import load_file

        settings = peft.PeftConfig.from_pretrained(str(adapter))
        _check_adapter_settings(adapter, settings, is_reward_model)
        settings.inference_mode = False
        with warnings.catch_warnings():
            ignore_peft_warnings()
            adapted: PeftModel = peft.get_peft_model(model, settings)
            tensors = _without_base(adapted, load_file(adapter / ADAPTER_WEIGHTS))
            _make_real(adapted)
            cast_weights(adapted, torch.float32)
            result: Any = peft.set_peft_model_state_dict(adapted, tensors)

    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    mismatched = sorted(trained.intersection(result.missing_keys).union(result.unexpected_keys))
    if mismatched:
        raise UserError(
            f"{adapter} does not fit {base}: only one of them has {mismatched[0]}; set "
            "base_model_name_or_path in adapter_config.json to the model that it was trained on."
        )
    has_rows = isinstance(model.get_input_embeddings(), peft.utils.AuxiliaryTrainingWrapper)
    if new_tokens and not has_rows:
        raise UserError(
            f"--continue_adapter: {adapter} does not train the embeddings of {len(new_tokens)} "
            "tokens that its base lacks; leave the flag out to merge it into its base."
        )
    set_base(adapted, base, base_commit)
    return adapted


def _check_adapter_settings(
    adapter: Path, settings: "peft.PeftConfig", is_reward_model: bool
) -> None:
    """Raise :class:`UserError` if an adapter is not LoRA on the weights of its base."""
    import peft

    if not isinstance(settings, peft.LoraConfig):
        kind = peft.PeftType(settings.peft_type).value
        raise UserError(
            f"--continue_adapter: {adapter} is a {kind} adapter, and only LoRA adapters can be "
            "trained further."
        )
    if (settings.task_type == "SEQ_CLS") != is_reward_model:
        kind = "causal LM" if is_reward_model else "reward model"
        raise UserError(
            f"--continue_adapter: {adapter} is an adapter of a {kind}, which this run does not "
            "train; only --loss_type reward trains reward models."
        )
    start = settings.init_lora_weights
    if start not in (True, False, "gaussian", "orthogonal", "eva"):
        raise UserError(
            f"--continue_adapter: {adapter} was initialised with {start}, which changed the "
            "weights of its base; convert it to plain LoRA first (path_initial_model_for_weight_"
            "conversion of peft)."
        )


def _without_base(adapted: "PeftModel", stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file without those of its base.

    peft also stores the weights of an embedding or a head that has LoRA's matrices.
    """
    parameters = adapted.named_parameters(remove_duplicate=False)  # tied ones have two names
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in stored.items() if name not in frozen}


def _make_real(model: nn.Module) -> None:
    """Allocate memory for the trained parameters that are on the meta device, in place."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_meta:
            real = nn.Parameter(torch.empty_like(parameter, device="cpu"))
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
