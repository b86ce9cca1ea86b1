"""Settings as ``run.json`` records them."""

from typing import Any

from llmtrain.config.flags import resolved
from recipes import distill, finetune, gpt, preference

_SHIPPED = {}
for _recipe in (gpt, finetune, preference, distill):
    _SHIPPED |= resolved(_recipe.DEFAULTS)
EFFECTS = {name: setting["affects"] for name, setting in _SHIPPED.items()}


def recorded(values: dict[str, Any], origin: str = "recipe") -> dict[str, dict[str, Any]]:
    """Flags with their values; those that no shipped recipe has affect numbers."""
    return {
        name: {"value": value, "from": origin, "affects": EFFECTS.get(name, "numbers")}
        for name, value in values.items()
    }
