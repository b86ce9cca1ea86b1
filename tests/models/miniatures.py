"""Small configurations of any model class, with layers of every kind that the large one has."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_VOCABULARY = 512
_SPAN = 32  # of sliding windows and attention chunks
_MOST_EXPERTS = 4
_FEWEST_LAYERS = 2
_FEWEST_HEADS = 4  # of attention that has as many
_LEAST_WIDTH = 128
_TOWER_FACTOR = 8

# Keys of configurations. If heads become fewer and stay as large, the other sizes can shrink by the
# same factor: classes ask that widths are multiples of the heads.
_HEADS = re.compile(r"heads|(^|_)n_head$|groups$")
_WIDTHS = re.compile(r"(size|dim|width|embd|inner|d_ssm|d_model|d_ff)$")
# The kernels of experts take multiples of 16 only.
_WIDTHS_OF_EXPERTS = re.compile(r"moe|expert|shared")
_INNER_WIDTHS = re.compile(r"intermediate|ffn|d_ff$")  # of feed-forward layers
_OTHER_SIZES = re.compile(
    r"batch|block|chunk|conv|group|head|image|index|kernel|layer|patch|position|rank|rope|rotary"
    r"|state|token|vocab|window"
)
_SPANS = ("sliding_window", "attention_chunk_size")
_DEPTHS = ("num_hidden_layers", "depth")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_EXPERT_GROUPS = ("n_group", "topk_group")


def miniatures(
    config: PreTrainedConfig, build: Callable[[PreTrainedConfig], nn.Module]
) -> Iterator[PreTrainedConfig]:
    """Yield small configurations of the same class, the smallest first.

    Classes restrict their sizes in many ways, so a class may reject the smallest one.

    Args:
        config: the configuration.
        build: builds a model on the meta device.
    """
    for narrow in (_with_narrow_layers, _with_fewer_heads, _with_all_heads):
        try:
            narrow_config = _changed(config, narrow)
            count = _layers_of_every_kind(narrow_config, build(narrow_config))
            yield _changed(narrow_config, functools.partial(_with_fewer_layers, layers=count))
        except Exception:  # the class rejects these sizes, each in its own way
            continue


def _changed(
    config: PreTrainedConfig, change: Callable[[dict[str, Any], PreTrainedConfig], None]
) -> PreTrainedConfig:
    """Return a configuration in which ``change`` was made to the part of the language model."""
    values = config.to_dict()
    for key in ("quantization_config", "dtype", "auto_map"):
        values.pop(key, None)

    text_config = config.get_text_config()
    if text_config is config:
        change(values, config)
    for key, part in values.items():
        if not isinstance(part, dict):
            continue
        if getattr(config, key, None) is text_config:
            change(part, text_config)
        elif any(depth in part for depth in _DEPTHS):
            _make_tower_small(part)
    return type(config).from_dict(values)


def _make_tower_small(values: dict[str, Any]) -> None:
    """Make one narrow layer of a tower for images or sound, which no text meets."""
    for key, value in values.items():
        is_width = bool(_WIDTHS.search(key)) and not _OTHER_SIZES.search(key)
        if is_width or _HEADS.search(key):
            values[key] = _divided(value, _TOWER_FACTOR, unit=1)
        elif key in _DEPTHS:
            values[key] = 1


def _with_narrow_layers(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Divide every width once more, for classes whose heads may be wider than their share of it."""
    factor = _divisor(_head_counts(values), int(config.hidden_size))
    width = int(config.hidden_size) // factor
    narrower = 1
    while width % (2 * narrower) == 0 and width // (2 * narrower) >= _LEAST_WIDTH:
        narrower *= 2
    _divide_sizes(values, config, factor, narrower * factor)


def _with_fewer_heads(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Divide the number of heads, and every width, by a common divisor."""
    factor = _divisor(_head_counts(values), int(config.hidden_size))
    _divide_sizes(values, config, factor, factor)


def _divide_sizes(
    values: dict[str, Any], config: PreTrainedConfig, head_factor: int, width_factor: int
) -> None:
    for key, value in values.items():
        unit = 16 if _WIDTHS_OF_EXPERTS.search(key) else 1
        if _HEADS.search(key):
            values[key] = _divided(value, head_factor, unit)
        elif _WIDTHS.search(key) and not _OTHER_SIZES.search(key):
            values[key] = _divided(value, width_factor, unit)
        if _INNER_WIDTHS.search(key):
            values[key] = _at_most(values[key], 2 * int(config.hidden_size) // width_factor)
    _with_all_heads(values, config)


def _head_counts(values: dict[str, Any]) -> list[int]:
    return [
        value
        for key, value in values.items()
        if _HEADS.search(key) and isinstance(value, int) and value > 1
    ]


def _divisor(counts: list[int], hidden_size: int) -> int:
    """Return a common divisor, the largest one that leaves a few heads."""
    if not counts:
        return 1
    common = math.gcd(*counts, hidden_size)
    most = max(counts) // _FEWEST_HEADS
    fitting = [number for number in range(2, most + 1) if common % number == 0]
    return max(fitting, default=common)


def _divided(value: Any, factor: int, unit: int) -> Any:
    """Return a number divided by a factor, or every number of a list, as a multiple of a unit."""
    if isinstance(value, list):
        return [_divided(item, factor, unit) for item in value]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
        return value
    return unit * math.ceil(value / factor / unit)


def _at_most(value: Any, limit: int) -> Any:
    if isinstance(value, list):
        return [_at_most(item, limit) for item in value]
    return min(value, limit) if type(value) is int else value


def _with_all_heads(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Lower the vocabulary, the number of experts, and the spans of attention."""
    for key, value in values.items():
        if "vocab_size" in key and isinstance(value, int):
            values[key] = min(value, _VOCABULARY)
        if key.endswith("token_id"):
            values[key] = _within_vocabulary(value)
        if key in _SPANS and value:
            values[key] = min(value, _SPAN)
        if key in _EXPERT_GROUPS and value:
            values[key] = 1

    counts = [values[key] for key in _CHOSEN_EXPERTS if isinstance(values.get(key), int)]
    chosen = max(counts, default=1)
    for key in _EXPERTS:
        if isinstance(values.get(key), int):
            values[key] = min(values[key], max(chosen, _MOST_EXPERTS))


def _within_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_within_vocabulary(item) for item in value]
    return min(value, _VOCABULARY - 1) if isinstance(value, int) else value


def _layers_of_every_kind(config: PreTrainedConfig, model: nn.Module) -> int:
    """Return how many of a model's first layers are needed for one of every kind."""
    text_config = config.get_text_config()
    count = int(text_config.num_hidden_layers)
    kinds: list[list[object]] = [[] for _ in range(count)]

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            for kind, layer in zip(kinds, module, strict=True):
                kind += [(name, type(part)) for name, part in layer.named_modules()]
    for key, value in text_config.to_dict().items():
        if isinstance(value, list) and len(value) == count and not _is_list_of_layers(value, count):
            for kind, item in zip(kinds, value, strict=True):
                kind.append((key, str(item)))

    first_of_kind = {str(kind): number for number, kind in reversed([*enumerate(kinds)])}
    return min(max([*first_of_kind.values(), _FEWEST_LAYERS - 1]) + 1, count)


def _with_fewer_layers(values: dict[str, Any], config: PreTrainedConfig, layers: int) -> None:
    """Keep only the first layers."""
    count = int(config.num_hidden_layers)
    depth_key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if depth_key in values:
        values[depth_key] = layers
    for key, value in values.items():
        if isinstance(value, dict) and all(str(number).isdigit() for number in value):
            values[key] = {number: item for number, item in value.items() if int(number) < layers}
        if not isinstance(value, list):
            continue
        if "layer" in key and _is_list_of_layers(value, count):
            values[key] = [number for number in value if number < layers]
        elif len(value) == count:
            values[key] = value[:layers]


def _is_list_of_layers(value: list[Any], count: int) -> bool:
    """Return whether a list holds the numbers of some layers, in ascending order."""
    if not value or not all(type(item) is int and 0 <= item < count for item in value):
        return False
    return value == sorted(set(value))
