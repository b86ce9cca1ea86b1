"""Make the list of model classes that keep packed documents apart: packing_verdicts.json.

Run it with the transformers version that the list is for, from the root of the repository, and
commit the file that it writes. It takes about five minutes:

    python -m tests.models.packing_verdicts

A small model of every causal LM of transformers, with random weights, is tried as a run tries the
model that it trains. Classes that cannot be tried are printed, and are not on the list: rows are
not packed for them.
"""

import copy
import json
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from llmtrain.errors import first_line
from llmtrain.models import packing_support
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.hub_models import auto_class, causal_lm_classes
from llmtrain.models.probe import leaks, probe, shares_prompts
from tests.models.miniatures import miniatures

Verdict = Literal["leaks", "packs", "shares"]  # the worst first
ORDER = ("leaks", "packs", "shares")

_ROW_LENGTH = 128  # longer than the sliding windows and attention chunks of miniatures
_MOST_PARAMETERS = 300_000_000  # in float32

# Values of published configurations that the default of the class lacks. Without them, the class
# cannot be built, or has no layers of some type.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
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


def types_of_classes() -> dict[str, list[str]]:
    """Return the model types that each causal LM of transformers is the class of."""
    types: dict[str, list[str]] = {}
    for model_type in [
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ]:
        names = causal_lm_classes(model_type)
        assert names is not None
        class_name, _ = names
        if model_type not in types.setdefault(class_name, []):
            types[class_name].append(model_type)
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
            config = AutoConfig.for_model(model_type, **_PUBLISHED.get(model_type, {}))
            verdicts.append(verdict_on(config))
        except Exception as error:  # each class fails in its own way
            problems.append(first_line(error))
    if not verdicts:
        raise UntriedError(problems[0])
    return min(verdicts, key=ORDER.index)


def verdict_on(config: PreTrainedConfig) -> Verdict:
    """Return the verdict on a model with this configuration: on the smallest that can be tried.

    Raises:
        UntriedError: if none can.
    """
    problem = "it accepts no small sizes"
    for miniature in miniatures(config, build_on_meta_device):
        try:
            parameters = build_on_meta_device(miniature).parameters()
            count = sum(weight.numel() for weight in parameters)
            if count > _MOST_PARAMETERS:
                raise UntriedError(f"a small model has {count:,} parameters")
            return _verdict_on_miniature(miniature)
        except Exception as error:  # each class fails in its own way
            problem = first_line(error)
    raise UntriedError(problem)


def _verdict_on_miniature(miniature: PreTrainedConfig) -> Verdict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(miniature)

    # With shared prompts, a model may compute its attention in another way. Attention chunks that
    # are shorter than the row exclude them.
    chunk = getattr(miniature.get_text_config(), "attention_chunk_size", None)
    for_pairs = make_causal_lm(copy.deepcopy(model), chunk or _ROW_LENGTH, shares_prompts=True)
    for_documents = make_causal_lm(model, _ROW_LENGTH)
    probe(for_documents)
    if leaks(for_documents):
        return "leaks"
    probe(for_pairs)
    return "shares" if shares_prompts(for_pairs) and not leaks(for_pairs) else "packs"


def build_on_meta_device(config: PreTrainedConfig) -> nn.Module:
    """Build a model whose weights take no memory."""
    with torch.device("meta"), no_init_weights():
        return _build(config)


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    logging.set_verbosity_error()
    config = copy.deepcopy(config)  # a model changes the configuration that it is built from
    return auto_class(config).from_config(config, dtype=torch.float32)


def main() -> None:
    """Try every class, and write the list."""
    classes: dict[str, Verdict] = {}
    for class_name, model_types in sorted(types_of_classes().items()):
        try:
            classes[class_name] = verdict_on_types(model_types)
            print(class_name, classes[class_name], flush=True)
        except UntriedError as error:
            print(class_name, "was not tried:", error, flush=True)

    listed = {"transformers": transformers.__version__, "classes": classes}
    text = json.dumps(listed, indent=2)
    packing_support.VERDICTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
