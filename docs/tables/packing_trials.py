"""Try whether small models keep packed documents apart, as a run tries the model that it trains."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from docs.tables.miniatures import miniatures
from llmtrain.errors import first_line
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.causal_lm import CausalLM, make_causal_lm
from llmtrain.models.config import ModelConfig
from llmtrain.models.hub_models import auto_class, causal_lm_classes
from llmtrain.models.model_classes import check_causal_lm_class
from llmtrain.models.probe import (
    differ,
    example_tokens,
    leaks,
    probe,
    probe_output,
    shares_prompts,
    trying,
)
from llmtrain.models.text_tower import outside_text_tower, remove_outside_text

Verdict = Literal["leaks", "packs", "shares"]  # the worst first
ORDER = ("leaks", "packs", "shares")
Result = TypeVar("Result")

ROW_LENGTH = 128  # longer than the sliding windows and attention chunks of miniatures
_MOST_PARAMETERS = 300_000_000  # in float32

# Values of published configurations that the default of the class lacks. Without them, the class
# cannot be built, or has no layers of some type.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "gemma4": {"vision_config": {}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}


class UntriedError(Exception):
    """No small model of a class can be tried."""


class Packing(NamedTuple):
    """Whether a model keeps packed documents apart.

    Attributes:
        verdict: the verdict on the model.
        reason: why it leaks, or why prompts are not shared; empty if they are.
    """

    verdict: Verdict
    reason: str


def types_of_classes() -> dict[str, list[str]]:
    """Return the model types whose models are trained as each class of transformers."""
    types: dict[str, list[str]] = {}
    for model_type in {
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }:
        names = causal_lm_classes(model_type)
        assert names is not None
        class_name, _ = names
        types.setdefault(class_name, []).append(model_type)
    return types


def verdict_on_types(model_types: list[str]) -> Verdict:
    """Return the worst verdict on the models of some types, which have the same class.

    Raises:
        UntriedError: if no model can be tried.
    """
    verdicts: list[Verdict] = []
    problems: list[str] = []
    for model_type in model_types:
        try:
            config = published_config(model_type)
            check_causal_lm_class(ModelConfig(from_config=model_type), config)
            packing = with_smallest(config, lambda small: packing_of(build(small)))
            verdicts.append(packing.verdict)
        except Exception as error:  # each class fails in its own way
            problems.append(first_line(error))
    if not verdicts:
        raise UntriedError(problems[0])
    return min(verdicts, key=ORDER.index)


def published_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration with the sizes of a published model."""
    return AutoConfig.for_model(model_type, **_PUBLISHED.get(model_type, {}))


def with_smallest(config: PreTrainedConfig, trial: Callable[[PreTrainedConfig], Result]) -> Result:
    """Return the result of a trial with the smallest configuration that does not fail.

    Raises:
        UntriedError: if all fail.
    """
    problem = "it accepts no small sizes"
    for miniature in miniatures(config, build_on_meta_device):
        try:
            parameters = build_on_meta_device(miniature).parameters()
            count = sum(weight.numel() for weight in parameters)
            if count > _MOST_PARAMETERS:
                raise UntriedError(f"a small model has {count:,} parameters")
            return trial(miniature)
        except Exception as error:  # each class fails in its own way
            problem = first_line(error)
    raise UntriedError(problem)


def packing_of(model: PreTrainedModel) -> Packing:
    """Return the verdict on a model, which changes."""
    remove_outside_text(model, outside_text_tower(model))
    # A model may compute its attention differently if prompts are shared. They cannot be shared if
    # attention has chunks that are shorter than the row.
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    model_for_pairs = make_causal_lm(copy.deepcopy(model), chunk or ROW_LENGTH, shares_prompts=True)

    model_for_documents = make_causal_lm(model, ROW_LENGTH)
    probe(model_for_documents)
    if leaks(model_for_documents):
        return Packing("leaks", _reason_of_leak(model_for_documents))

    probe(model_for_pairs)
    if shares_prompts(model_for_pairs) and not leaks(model_for_pairs):
        return Packing("shares", "")
    implementation = model_for_pairs.config._attn_implementation
    if implementation == ATTENTION_NAME:
        return Packing("packs", "other layers")
    return Packing("packs", f"{implementation} attention")


def build_on_meta_device(config: PreTrainedConfig) -> nn.Module:
    """Build a model whose weights take no memory."""
    with torch.device("meta"), no_init_weights():
        return build(config)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with random weights, always the same ones."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = copy.deepcopy(config)  # a model changes the configuration that it is built from
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto_class(config).from_config(config, dtype=torch.float32)


# --- the reason for a leak


class _Call(NamedTuple):
    """The hidden states of the second documents of two rows, before and after a module.

    Attributes:
        module: the name of the class of the module.
        inputs: the hidden states that it got [B, T, C].
        outputs: the hidden states that it returned [B, T, C].
    """

    module: str
    inputs: Tensor
    outputs: Tensor


_DOCUMENT = 8  # tokens


def _reason_of_leak(model: CausalLM) -> str:
    """Return the class of the first module that leaks, and the argument that a model lacks.

    That module returns other hidden states for the second document of a row if the first document
    changes, although it gets the same ones.
    """
    ids = example_tokens(model, 2, 2 * _DOCUMENT)
    other_ids = ids.clone()
    other_ids[:, :_DOCUMENT] = other_ids[:, :_DOCUMENT].flip(1)

    reasons: list[str] = []
    for call, changed in zip(_calls(model, ids), _calls(model, other_ids), strict=True):
        has_same_inputs = not differ(call.inputs, changed.inputs)
        if has_same_inputs and differ(call.outputs, changed.outputs):
            reasons.append(call.module)
            break
    if "position_ids" not in inspect.signature(model.own_class.forward).parameters:
        reasons.append("no `position_ids`")
    return ", ".join(reasons) or "in long rows"


def _calls(model: CausalLM, ids: Tensor) -> Iterator[_Call]:
    """Run a model on packed rows, and yield the calls of its modules, inner modules first."""
    positions = torch.arange(_DOCUMENT).repeat(2).expand_as(ids)
    calls: list[_Call] = []

    def record(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = _hidden_states([*args, *kwargs.values()])
        outputs = _hidden_states(output if isinstance(output, tuple) else [output])
        if inputs is not None and outputs is not None:
            calls.append(_Call(name, inputs, outputs))

    hooks = [
        module.register_forward_hook(
            functools.partial(record, type(module).__name__), with_kwargs=True
        )
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
    ]
    try:
        with trying(model):
            try:
                probe_output(model, ids, positions)
            except TypeError:
                probe_output(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    yield from calls


def _hidden_states(values: Any) -> Tensor | None:
    """Return the hidden states of the second document, from the first value that has some."""
    for value in values:
        is_tensor = isinstance(value, Tensor) and value.is_floating_point()
        if is_tensor and value.ndim == 3 and value.shape[1] == 2 * _DOCUMENT:
            return value[:, _DOCUMENT:]
    return None
