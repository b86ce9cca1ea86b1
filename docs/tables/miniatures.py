"""Small configurations of any model class, with layers of every kind that the large one has."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

# Sizes of a miniature.
_VOCABULARY_SIZE = 512
_SPAN = 32  # of sliding windows and attention chunks
_MAX_EXPERTS = 4  # a model that sends each token to more experts keeps as many
_MIN_LAYERS = 2
_MIN_HEADS = 4  # of attention; a model that has fewer keeps them
_MIN_WIDTH = 128  # of layers
_TOWER_FACTOR = 8  # by which towers for images or sound are made narrower

# Keys of configurations. If a class has fewer heads of the same size, all its widths have to shrink
# by the same factor, because classes ask that widths are multiples of the number of heads.
_HEADS = re.compile(r"heads|(^|_)n_head$|groups$")
_WIDTHS = re.compile(r"(size|dim|width|embd|inner|d_ssm|d_model|d_ff)$")
_WIDTHS_OF_EXPERTS = re.compile(r"moe|expert|shared")
_WIDTHS_OF_FEED_FORWARD = re.compile(r"intermediate|ffn|d_ff$")
_NO_WIDTHS = re.compile(  # other sizes, among the keys that end like a width
    r"batch|block|chunk|conv|group|head|image|index|kernel|layer|patch|position|rank|rope|rotary"
    r"|state|token|vocab|window"
)
_SPANS = ("sliding_window", "attention_chunk_size")
_DEPTHS = ("num_hidden_layers", "depth")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
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
    for make_small in (_make_layers_narrow, _reduce_heads, _reduce_other_sizes):
        try:
            small_config = _changed(config, make_small)
            layers = _layers_of_every_kind(small_config, build(small_config))
            keep_layers = functools.partial(_keep_first_layers, layers=layers)
            yield _changed(small_config, keep_layers)
        except Exception:  # the class rejects these sizes, each in its own way
            continue


def _changed(
    config: PreTrainedConfig, change: Callable[[dict[str, Any], PreTrainedConfig], None]
) -> PreTrainedConfig:
    """Return a copy of a configuration whose language model is changed, and whose towers are small.

    Args:
        config: the configuration.
        change: changes the values of the language model, given those and its configuration.
    """
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
    """Leave one narrow layer of a tower for images or sound, which text does not reach."""
    for key, value in values.items():
        if _HEADS.search(key) or _is_width(key):
            values[key] = _divided(value, _TOWER_FACTOR)
        elif key in _DEPTHS:
            values[key] = 1


# --- widths and heads


def _make_layers_narrow(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Divide the heads and widths, and then the widths again by a power of two.

    It suits classes whose heads together may be wider than the layer.
    """
    head_factor = _head_divisor(values, config)
    width = int(config.hidden_size) // head_factor
    narrower = 1
    while width % (2 * narrower) == 0 and width // (2 * narrower) >= _MIN_WIDTH:
        narrower *= 2
    _divide_sizes(values, config, head_factor=head_factor, width_factor=narrower * head_factor)


def _reduce_heads(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Divide the number of heads, and every width, by a common divisor."""
    factor = _head_divisor(values, config)
    _divide_sizes(values, config, head_factor=factor, width_factor=factor)


def _divide_sizes(
    values: dict[str, Any], config: PreTrainedConfig, head_factor: int, width_factor: int
) -> None:
    max_feed_forward_width = 2 * int(config.hidden_size) // width_factor
    for key, value in values.items():
        # The kernels of experts take multiples of 16 only.
        unit = 16 if _WIDTHS_OF_EXPERTS.search(key) else 1
        if _HEADS.search(key):
            values[key] = _divided(value, head_factor, unit)
        elif _is_width(key):
            values[key] = _divided(value, width_factor, unit)
        if _WIDTHS_OF_FEED_FORWARD.search(key):
            values[key] = _at_most(values[key], max_feed_forward_width)
    _reduce_other_sizes(values, config)


def _is_width(key: str) -> bool:
    return bool(_WIDTHS.search(key)) and not _NO_WIDTHS.search(key)


def _head_divisor(values: dict[str, Any], config: PreTrainedConfig) -> int:
    """Return the number by which to divide heads and widths.

    It divides the width and every number of heads, and is the largest such number that leaves
    ``_MIN_HEADS``. If there is none above one, it is the greatest common divisor.
    """
    counts = []
    for key, value in values.items():
        if _HEADS.search(key) and isinstance(value, int) and value > 1:
            counts.append(value)
    if not counts:
        return 1

    common_divisor = math.gcd(int(config.hidden_size), *counts)
    largest = max(counts) // _MIN_HEADS
    divisors = [number for number in range(2, largest + 1) if common_divisor % number == 0]
    return max(divisors, default=common_divisor)


# --- the vocabulary, experts and spans of attention


def _reduce_other_sizes(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Reduce the vocabulary, the number of experts, and the spans of attention."""
    for key, value in values.items():
        if "vocab_size" in key and isinstance(value, int):
            values[key] = min(value, _VOCABULARY_SIZE)
        if key.endswith("token_id"):
            values[key] = _at_most(value, _VOCABULARY_SIZE - 1)
        if key in _SPANS and value:
            values[key] = min(value, _SPAN)
        if key in _EXPERT_GROUPS and value:
            values[key] = 1

    counts = [values[key] for key in _EXPERTS_PER_TOKEN if isinstance(values.get(key), int)]
    experts_per_token = max(counts, default=1)
    for key in _EXPERTS:
        if isinstance(values.get(key), int):
            values[key] = min(values[key], max(experts_per_token, _MAX_EXPERTS))


# --- numbers, and lists of numbers


def _divided(value: Any, factor: int, unit: int = 1) -> Any:
    """Divide a number, or each number of a list, and round up to a multiple of a unit.

    Numbers up to 1, and anything that is no integer, stay as they are.
    """
    if isinstance(value, list):
        return [_divided(item, factor, unit) for item in value]
    if type(value) is not int or value <= 1:
        return value
    return unit * math.ceil(value / factor / unit)


def _at_most(value: Any, limit: int) -> Any:
    """Limit a number, or each number of a list. Anything that is no integer stays as it is."""
    if isinstance(value, list):
        return [_at_most(item, limit) for item in value]
    return min(value, limit) if type(value) is int else value


# --- layers


def _layers_of_every_kind(config: PreTrainedConfig, model: nn.Module) -> int:
    """Return how many of a model's first layers are needed to have one of every kind.

    Two layers are of one kind if their modules have the same classes, and if all lists of the
    configuration that have an item for each layer have the same item for both.
    """
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

    first_of_kind: dict[str, int] = {}
    for index, kind in enumerate(kinds):
        first_of_kind.setdefault(str(kind), index)
    needed = max(first_of_kind.values(), default=0) + 1
    return min(max(needed, _MIN_LAYERS), count)


def _keep_first_layers(values: dict[str, Any], config: PreTrainedConfig, layers: int) -> None:
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
