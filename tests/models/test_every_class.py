"""Every causal LM of transformers: its random weights, its stored buffers and its weight decay.

A class that no small configuration can be made of is left out.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from docs.tables.packing_trials import (
    build,
    published_config,
    with_smallest,
)
from llmtrain.models.hub_models import auto_class, without_weights
from llmtrain.models.weight_loading import random_weights
from llmtrain.training.optim import decayed_parameters
from tests.launching import long_form
from tests.models.small_models import twins

# Where weight decay differs from that of the Trainer. It asks for names only, so it lets numbers
# and vectors decay that are no matrices, and the weights of norms with names of their own.
NORMS_OF_OTHER_NAMES = {
    "norm_f.weight",
    "norm_ffn.weight",
    "norm_mlstm.weight",
    "post_norm1.weight",
    "post_norm2.weight",
}
MATRICES_THAT_DO_NOT_DECAY = {
    # States of state space models decay at a learned rate, whose authors exempt it.
    ("falcon_mamba", "A_log"),
    ("jamba", "A_log"),
    ("kimi_linear", "A_log"),
    ("mamba", "A_log"),
}


def scan(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """Return what differs in a small model of a class, by the kind of the difference.

    These are parameters whose random weights or weight decay are not like those of transformers,
    pairs of parameters with the same random numbers, and stored buffers.
    """
    expected = build(config)
    own_config = copy.deepcopy(config)  # a model changes the configuration that it is built from
    own = without_weights(
        lambda: auto_class(own_config).from_config(own_config, dtype=torch.float32)
    )
    weights = {name: tensor.clone() for name, tensor in random_weights(own, seed=3)}
    expected_weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    unlike = [
        name
        for name, tensor in expected_weights.items()
        if name not in weights or not are_alike(weights[name], tensor)
    ]
    return {
        "weights": unlike,
        "twins": twins(weights),
        "buffers": different_buffers(own, expected),
        **different_decay(own),
    }


def are_alike(weights: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal, or random numbers of about the same distribution."""
    if weights.shape != expected.shape or not weights.isfinite().all():
        return False
    if torch.equal(weights, expected):
        return True
    if weights.numel() == 1:  # which may be a random number
        return True
    is_random = bool(expected.std() > 0 and weights.std() > 0)
    if weights.numel() < 500:
        return is_random
    deviation = float(expected.std())
    has_same_mean = abs(float(weights.mean() - expected.mean())) < 0.2 * deviation
    return is_random and has_same_mean and 0.8 < float(weights.std()) / deviation < 1.25


def different_buffers(own: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of the stored buffers whose values differ."""
    parameters = dict(own.named_parameters(remove_duplicate=False))
    stored = expected.state_dict()
    return [
        name
        for name, tensor in own.state_dict().items()
        if name not in parameters and not torch.equal(tensor, stored[name])
    ]


def different_decay(model: Any) -> dict[str, list[str]]:
    """Return the parameters whose weight decay is not that of the Trainer, by their kind."""
    of_trainer = {*Trainer.get_decay_parameter_names(None, model)}
    own = {parameter for _, parameter in decayed_parameters(model)}
    different: dict[str, list[str]] = {"norms": [], "matrices": []}
    for name, parameter in model.named_parameters():
        if (name in of_trainer) == (parameter in own) or not parameter.requires_grad:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        if "Norm" in type(module).__name__:
            different["norms"].append(name)
        elif parameter.dim() >= 2:
            different["matrices"].append(name)
    return different


def last_names(names: list[str], count: int) -> set[str]:
    """Return the last parts of names."""
    return {".".join(name.split(".")[-count:]) for name in names}


@long_form
def test_every_class_begins_and_decays_as_in_transformers() -> None:
    scans: dict[str, dict[str, list[Any]]] = {}
    untried: dict[str, str] = {}
    torch.set_num_threads(1)
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            scans[model_type] = with_smallest(published_config(model_type), scan)
        except Exception as error:  # each class fails in its own way
            untried[model_type] = str(error)

    assert len(scans) >= 160, untried
    for kind in ("weights", "twins", "buffers"):
        assert {name: found[kind] for name, found in scans.items() if found[kind]} == {}, kind

    norms = set.union(*(last_names(found["norms"], 2) for found in scans.values()))
    assert norms == NORMS_OF_OTHER_NAMES
    matrices = {
        (model_type, name)
        for model_type, found in scans.items()
        for name in last_names(found["matrices"], 1)
    }
    assert matrices == MATRICES_THAT_DO_NOT_DECAY
