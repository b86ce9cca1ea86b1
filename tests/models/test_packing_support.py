"""Whether a model class keeps packed documents apart is found out with a small model of the class."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llmtrain.models import packing_support
from llmtrain.models.config import ModelConfig
from llmtrain.models.miniature import miniatures
from llmtrain.models.packing_support import PackingSupport
from tests.families import FAMILIES

SMALL = "hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=1,"
LFM2 = SMALL + "num_hidden_layers=3,layer_types=[conv,full_attention,conv]"
MAMBA2 = "hidden_size=32,num_hidden_layers=2,num_heads=4,head_dim=16,state_size=8,n_groups=1,chunk_size=16"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "packing"


def support_of(family: str, overrides: str, folder: Path, **settings: Any) -> PackingSupport:
    config = ModelConfig(from_config=family, config_overrides=overrides, max_length=48, **settings)
    support = packing_support.packing_support(config, folder)
    assert support is not None
    return support


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The classes that were tried, instead of read from the cache."""
    tried: list[str] = []
    own = packing_support._try

    def count(class_name: str, *others: Any) -> PackingSupport:
        tried.append(class_name)
        return own(class_name, *others)

    monkeypatch.setattr(packing_support, "_try", count)
    return tried


def test_a_verdict_is_remembered_by_the_class_its_configuration_and_versions(
    cache: Path, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = support_of("lfm2", LFM2, cache)
    assert first == PackingSupport("Lfm2ForCausalLM", packs=True, shares_prompts=True)
    assert support_of("lfm2", LFM2, cache) == first
    assert len(trials) == 1

    support_of("lfm2", LFM2.replace("conv,full", "full_attention,full"), cache)
    support_of("lfm2", LFM2, cache, attn_implementation="eager")
    # Not the module of an `import` above: transformers replaces itself while it is imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99")
    support_of("lfm2", LFM2, cache)
    monkeypatch.setattr(packing_support, "has_recurrence_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(packing_support, "_verdicts", lambda *_: (True, True))
    support_of("lfm2", LFM2, cache)
    assert len(trials) == 5


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"packs": true}', b'{"packs": 1, "shares_prompts": 1}', b"\xff"],
)
def test_a_damaged_verdict_is_ignored_and_written_anew(
    content: bytes, cache: Path, trials: list[str]
) -> None:
    first = support_of("mamba2", MAMBA2, cache)
    (entry,) = cache.iterdir()
    intact = entry.read_bytes()
    entry.write_bytes(content)
    assert support_of("mamba2", MAMBA2, cache) == first
    assert len(trials) == 2
    assert entry.read_bytes() == intact
    assert [*cache.iterdir()] == [entry]


def test_a_cache_that_cannot_be_written_costs_a_trial_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not support_of("mamba2", MAMBA2, tmp_path / "file" / "packing").packs


LEAKING = ["bloom", "opt", "gpt_oss", "mamba"]


@pytest.mark.parametrize("family", [*FAMILIES, *LEAKING])
def test_a_miniature_has_the_verdict_of_its_family(family: str, cache: Path) -> None:
    """Of the sizes that a published model has: those of the class's own configuration."""
    config = AutoConfig.for_model(family)
    support = packing_support._try("X", config, None, 1024)
    shares = family not in (*LEAKING, "gemma2")
    assert support == PackingSupport("X", packs=family not in LEAKING, shares_prompts=shares)


PUBLISHED = {
    "llama": {"num_key_value_heads": 8},
    "gemma3_text": {},
    "llama4_text": {"num_hidden_layers": 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp"] * 4 + ["full_attention"] * 2},
    "jamba": {},
    "qwen3_next": {},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_miniature_is_small_and_has_layers_of_every_kind(family: str) -> None:
    config = AutoConfig.for_model(family, **PUBLISHED[family])
    build = packing_support._on_meta_device
    large = build(config)
    small = build(next(miniatures(config, 8192, build)))
    assert sum(p.numel() for p in small.parameters()) < 100e6
    assert kinds_of(small) == kinds_of(large)
    types = getattr(config, "layer_types", None) or []
    assert {*(getattr(small.config, "layer_types", None) or [])} == {*types}


def kinds_of(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} - {"Dropout"}


def test_a_sliding_window_is_shorter_than_the_rows_of_a_miniature_if_it_is_in_the_run() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    build = packing_support._on_meta_device
    assert next(miniatures(config, 8192, build)).sliding_window < 128
    assert next(miniatures(config, 2048, build)).sliding_window == 4096


def test_the_random_numbers_of_the_run_are_left_alone(cache: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    support_of("mamba2", MAMBA2, cache)
    assert torch.equal(torch.rand(3), expected)
