"""Find out whether a model class keeps packed documents apart, before rows are made for it.

The rows of a run are made before its model is. So a miniature of the model is tried: a model of the
same class, with layers of the same kinds and random weights, on the CPU. The model itself is tried
again when its weights are in place (:mod:`llmtrain.models.pretrained`).
"""

import contextlib
import copy
import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmtrain.errors import first_line
from llmtrain.files import json_text, read_object, write_json
from llmtrain.models.architecture import model_configuration
from llmtrain.models.causal_lm import has_recurrence_kernels, make_causal_lm
from llmtrain.models.config import ModelConfig
from llmtrain.models.miniature import ROW_LENGTH, miniatures
from llmtrain.models.probe import leaks, probe, shares_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Raise this number if another verdict may follow from the same configuration.
_VERSION = 1
_MOST_PARAMETERS = 300_000_000  # of a miniature, which has float32 weights


@dataclass(frozen=True)
class PackingSupport:
    """What rows a model class can be trained on.

    Attributes:
        class_name: the class.
        packs: whether packed documents do not see each other.
        shares_prompts: whether two answers can follow one copy of their prompt.
        problem: why nothing was found out; empty if a miniature was tried.
    """

    class_name: str
    packs: bool
    shares_prompts: bool
    problem: str = ""


def packing_support(config: ModelConfig, folder: Path) -> PackingSupport | None:
    """Return what rows a model can be trained on, or ``None`` if there is no such model.

    Args:
        config: which model, and how it is used.
        folder: where verdicts are kept. A damaged one is ignored.
    """
    import transformers

    try:
        model_config = model_configuration(config)
    except Exception:  # loading the model will report what is wrong with it
        return None

    class_name = _class_name(model_config, config.trust_remote_code)
    if not class_name:
        return PackingSupport(
            class_name=str(config.model_name_or_path or config.from_config),
            packs=False,
            shares_prompts=False,
            problem=(
                "its code is not part of transformers"
                if _has_own_code(model_config, config.trust_remote_code)
                else "transformers has no causal LM of this type"
            ),
        )

    implementation = _attention_to_try(config, model_config)
    key = [
        _VERSION,
        transformers.__version__,
        torch.__version__,
        class_name,
        _relevant(model_config),
        implementation,
        config.longest_row,
        has_recurrence_kernels() and torch.cuda.is_available(),
    ]
    digest = hashlib.sha256(json_text(key, sort_keys=True, default=str).encode()).hexdigest()
    path = folder / f"{digest[:32]}.json"

    support = _read(path, class_name)
    if support is None:
        support = _try(class_name, model_config, implementation, config.longest_row)
        if not support.problem:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(path, asdict(support))
    return support


def _class_name(model_config: "PreTrainedConfig", trust_remote_code: bool) -> str | None:
    """Return the name of transformers' class that is trained, or ``None`` if it has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    has_own_code = _has_own_code(model_config, trust_remote_code)
    if has_own_code or type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    return str(getattr(model_class, "__name__", model_config.model_type))


def _has_own_code(model_config: "PreTrainedConfig", trust_remote_code: bool) -> bool:
    """Return whether the model is of a class that comes with it."""
    auto_map = getattr(model_config, "auto_map", None) or {}
    return trust_remote_code and "AutoModelForCausalLM" in auto_map


def _relevant(model_config: "PreTrainedConfig") -> dict[str, object]:
    """Return a configuration without what the class does not depend on."""
    values = model_config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        values.pop(key, None)
    return values


def _attention_to_try(config: ModelConfig, model_config: "PreTrainedConfig") -> str | None:
    """Return the attention of transformers that a miniature uses; ``None`` for the class's own.

    Flash attention needs a GPU. It keeps documents apart in the same classes as others do.
    """
    implementation = config.attn_implementation or model_config._attn_implementation
    return implementation if implementation in ("eager", "sdpa") else None


def _read(path: Path, class_name: str) -> PackingSupport | None:
    """Return the verdict in a file, or ``None`` if it is damaged or absent."""
    content = read_object(path)
    packs = content.get("packs")
    shares = content.get("shares_prompts")
    if not isinstance(packs, bool) or not isinstance(shares, bool):
        return None
    return PackingSupport(class_name, packs=packs, shares_prompts=shares)


def _try(
    class_name: str,
    model_config: "PreTrainedConfig",
    implementation: str | None,
    row_length: int,
) -> PackingSupport:
    """Try the smallest miniature that the class accepts."""
    problem = ""
    for miniature in miniatures(model_config, row_length, _on_meta_device):
        try:
            _check_size(miniature)
            packs, shares = _verdicts(miniature, implementation, min(row_length, ROW_LENGTH))
        except Exception as error:  # each class fails in its own way
            problem = problem or f"a small model of it fails: {first_line(error).rstrip('.')}"
        else:
            return PackingSupport(class_name, packs=packs, shares_prompts=shares)
    return PackingSupport(
        class_name,
        packs=False,
        shares_prompts=False,
        problem=problem or "it accepts no small sizes",
    )


def _check_size(miniature: "PreTrainedConfig") -> None:
    parameters = sum(weight.numel() for weight in _on_meta_device(miniature).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"it has {parameters:,} parameters")


def _verdicts(
    miniature: "PreTrainedConfig", implementation: str | None, row_length: int
) -> tuple[bool, bool]:
    """Return whether a miniature keeps documents apart, and answers that share a prompt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(miniature, implementation)
    if has_recurrence_kernels() and torch.cuda.is_available():
        # These kernels need a GPU. This branch has not been run yet.
        model.to(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")  # type: ignore[arg-type]

    # A model that shares prompts may compute its attention in another way.
    for_pairs = make_causal_lm(copy.deepcopy(model), row_length, shares_prompts=True)
    for_documents = make_causal_lm(model, row_length)
    probe(for_documents)
    if leaks(for_documents):
        return False, False
    probe(for_pairs)
    return True, not leaks(for_pairs) and shares_prompts(for_pairs)


def _on_meta_device(config: "PreTrainedConfig") -> nn.Module:
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return _build(config, None)


def _build(config: "PreTrainedConfig", implementation: str | None) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options: dict[str, object] = {"dtype": torch.float32}
    if implementation is not None:
        options["attn_implementation"] = implementation
    config = copy.deepcopy(config)  # a model changes the configuration that it is built from
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    return build(config, **options)
