"""Whether a model keeps packed documents apart, which decides how its rows are made.

Rows are made before the weights are loaded, so the model itself cannot be tried then. Its class is
looked up in ``packing_verdicts.json`` instead. The model is tried when its weights are in place
(:mod:`llmtrain.models.pretrained`).
"""

import json
from pathlib import Path

from llmtrain.interfaces.packing_support import PackingSupport
from llmtrain.models.config import ModelConfig
from llmtrain.models.hub_models import causal_lm_classes
from llmtrain.models.meta_models import check_causal_lm_class
from llmtrain.models.reward import check_reward_family

# Made by docs/tables/models_table.py, which tries a small model of every class. The verdict on a
# class is "leaks", "packs", or "shares", which means that it packs and shares prompts as well.
VERDICTS = Path(__file__).with_name("packing_verdicts.json")


def packing_support(config: ModelConfig, *, is_reward_model: bool = False) -> PackingSupport | None:
    """Return what rows a model can be trained on, or ``None`` if there is no such model.

    Args:
        config: which model.
        is_reward_model: whether a reward model is trained, and no causal LM.

    Raises:
        UserError: if transformers has no class by which the model could be trained.
    """
    model_config = config.known_configuration()
    if model_config is None:
        return None
    if is_reward_model:
        check_reward_family(type(model_config))
    else:
        check_causal_lm_class(config, model_config)

    verdicts: dict[str, str] = json.loads(VERDICTS.read_text(encoding="utf-8"))["classes"]
    class_name, _ = causal_lm_classes(model_config.model_type) or (model_config.model_type, "")
    has_own_code = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if class_name not in verdicts or (config.trust_remote_code and has_own_code):
        problem = f"it was not tried whether {class_name} keeps documents apart (--packing packs)"
        return PackingSupport(problem)
    if verdicts[class_name] == "leaks":
        return PackingSupport(f"{class_name} lets the documents of a packed row see each other")

    # Only this package's attention keeps two answers apart. A model with transformers' "sdpa" gets
    # it, unless attention has chunks that are shorter than the row (llmtrain.models.probe).
    implementation = config.attn_implementation or model_config._attn_implementation or "sdpa"
    chunk: int = getattr(model_config.get_text_config(), "attention_chunk_size", None) or 0
    has_chunks = chunk > 0 and (config.max_length == "auto" or chunk < config.max_length)
    has_own_attention = implementation == "sdpa" and not has_chunks
    return PackingSupport(shares_prompts=has_own_attention and verdicts[class_name] == "shares")
