"""Rows are packed if the model class is known to keep documents apart."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import llmtrain as lt
from llmtrain.data.prepare import Tokenized
from llmtrain.errors import UserError
from llmtrain.models import packing_support, short_convolution
from llmtrain.models.config import ModelConfig
from llmtrain.models.meta_models import configuration_of
from llmtrain.models.packing_support import PackingSupport
from llmtrain.parallel.placement import place
from llmtrain.training import model_rows
from recipes import finetune, preference

pytestmark = pytest.mark.usefixtures("cache")

LINEAR = "linear_attention"
FULL = "full_attention"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TWO_LAYERS = {**SMALL, "num_hidden_layers": 2}
MIXER = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}

# Configurations of classes whose state passes from one document of a packed row to the next.
LEAKING: dict[str, dict[str, Any]] = {
    "bamba": {**TWO_LAYERS, **MIXER, "attn_layer_indices": [1]},
    "falcon_h1": {**TWO_LAYERS, **MIXER, "mamba_d_head": 8, "mamba_d_ssm": 32},
    "zamba2": {
        **SMALL,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layers_block_type": [LINEAR, "hybrid", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "chunk_size": 16,
        "attention_head_dim": 32,
        "attention_hidden_size": 64,
        "adapter_rank": 4,
    },
    "nemotron_h": {
        **SMALL,
        "head_dim": 16,
        "layers_block_type": [LINEAR, FULL, "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        **TWO_LAYERS,
        **MIXER,
        "num_local_experts": 0,
        "layer_types": [LINEAR, FULL],
        "shared_intermediate_size": 32,
    },
    "qwen3_next": {
        **TWO_LAYERS,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": [LINEAR, FULL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "jamba": {
        **TWO_LAYERS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
}
LFM2 = {**SMALL, "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]}


def overrides(configuration: dict[str, Any]) -> str:
    """Render ``--config_overrides`` as it is typed: NAME=VALUE,NAME=[VALUE,VALUE],..."""
    words = []
    for name, value in configuration.items():
        text = json.dumps(value, separators=(",", ":")).replace('"', "")
        words.append(f"{name}={text}")
    return f"--config_overrides {','.join(words)}"


def write(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    records = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(12)]
    return write(tmp_path / "chats.jsonl", records)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    records = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(12)]
    return write(tmp_path / "pairs.jsonl", records)


def prepare_rows(
    recipe: ModuleType, data: Path, family: str, flags: str = ""
) -> tuple[lt.Settings, Tokenized]:
    """Return the settings of a recipe, and the rows that the recipe makes."""
    common = (
        f"--dataset {data} --from_config {family} --tokenizer byte --chat_template chatml "
        "--block_size 48"
    )
    settings = lt.parse(recipe.DEFAULTS, f"{common} {flags}".split())
    return settings, recipe.tokenized(settings)


def packing_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("packing ")]


# --- the verdict on a class


@pytest.mark.parametrize("family", LEAKING)
def test_a_class_that_leaks_is_trained_on_unpacked_rows_and_the_log_says_so(
    family: str, chats: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    flags = f"{overrides(LEAKING[family])} --eval_fraction 0"
    settings, rows = prepare_rows(finetune, chats, family, flags)
    assert settings.chat.packing is False
    assert not rows.is_packed
    assert rows.metadata.train_rows == 12

    bundle = place(accelerator, finetune.build(settings, rows, "no"))
    (line,) = packing_lines(capsys.readouterr().out)
    assert line == (
        f"packing   conversations are not packed: {bundle.model.own_class.__name__} lets the "
        "documents of a packed row see each other"
    )

    first_rows = [rows.train[i] for i in range(4)]
    batch = {
        "input_ids": torch.tensor([row["input_ids"] for row in first_rows]),
        "labels": torch.tensor([row["labels"] for row in first_rows]),
    }
    optimizer = torch.optim.SGD(bundle.model.parameters(), lr=1e-3)
    loss = bundle.model(**batch)
    loss.backward()
    optimizer.step()
    assert bundle.model(**batch) < loss


@pytest.mark.parametrize(
    ("family", "configuration"), [("llama", {**TWO_LAYERS, "head_dim": 16}), ("lfm2", LFM2)]
)
def test_a_class_that_keeps_documents_apart_is_packed_without_a_line(
    family: str,
    configuration: dict[str, Any],
    chats: Path,
    accelerator: Any,
    capsys: pytest.CaptureFixture,
) -> None:
    settings, rows = prepare_rows(finetune, chats, family, overrides(configuration))
    place(accelerator, finetune.build(settings, rows, "no"))
    assert settings.chat.packing is True
    assert rows.is_packed
    assert rows.metadata.train_rows < 12
    assert packing_lines(capsys.readouterr().out) == []


def test_pairs_of_a_class_that_leaks_are_not_packed(
    pairs: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    settings, rows = prepare_rows(preference, pairs, "mamba2", overrides(LEAKING["mamba2"]))
    place(accelerator, preference.build(settings, rows, "no"))
    assert not rows.is_packed
    assert not rows.metadata.shared
    (line,) = packing_lines(capsys.readouterr().out)
    assert line.startswith("packing   pairs are not packed: Mamba2ForCausalLM lets")


def test_answers_share_a_prompt_if_the_class_keeps_them_apart(
    pairs: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    settings, rows = prepare_rows(preference, pairs, "lfm2", overrides(LFM2))
    place(accelerator, preference.build(settings, rows, "no"))
    assert rows.is_packed
    assert rows.metadata.shared
    assert settings.chat.share_prompts is True
    assert packing_lines(capsys.readouterr().out) == []


def test_answers_have_copies_of_the_prompt_if_the_class_cannot_share_it(
    pairs: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    flags = overrides({**TWO_LAYERS, "head_dim": 16})
    settings, rows = prepare_rows(preference, pairs, "gemma2", flags)
    place(accelerator, preference.build(settings, rows, "no"))
    assert rows.is_packed
    assert not rows.metadata.shared
    assert settings.chat.share_prompts is False
    assert packing_lines(capsys.readouterr().out) == [
        "packing   each answer has its own copy of the prompt: Gemma2ForCausalLM cannot share it "
        "between two answers"
    ]


def test_the_log_has_no_line_about_conversations_if_the_data_are_text(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    model = f"--from_config mamba2 {overrides(LEAKING['mamba2'])}"
    data = f"--dataset {text_file} --tokenizer byte --eval_fraction 0 --max_length 48"
    finetune.tokenized(lt.parse(finetune.DEFAULTS, f"{model} {data}".split()))
    output = capsys.readouterr().out
    assert "task      continued pretraining: the records are text, not conversations" in output
    assert packing_lines(output) == []


# --- classes without a verdict


@pytest.fixture
def no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the list of classes by an empty one."""
    path = tmp_path / "verdicts.json"
    path.write_text('{"classes": {}}')
    monkeypatch.setattr(packing_support, "VERDICTS", path)


@pytest.mark.usefixtures("no_verdicts")
def test_a_class_that_was_not_tried_is_not_packed_and_the_log_names_the_flag(
    chats: Path, capsys: pytest.CaptureFixture
) -> None:
    _, rows = prepare_rows(finetune, chats, "llama")
    assert not rows.is_packed
    assert packing_lines(capsys.readouterr().out) == [
        "packing   conversations are not packed: it is not known whether LlamaForCausalLM keeps "
        "packed documents apart, because the class was not tried (--packing packs them)"
    ]


@pytest.mark.usefixtures("no_verdicts")
def test_answers_of_a_class_that_was_not_tried_have_copies_of_the_prompt(
    pairs: Path, capsys: pytest.CaptureFixture
) -> None:
    _, rows = prepare_rows(preference, pairs, "llama", "--packing")
    assert rows.is_packed
    assert not rows.metadata.shared
    assert packing_lines(capsys.readouterr().out) == [
        "packing   each answer has its own copy of the prompt: it is not known whether "
        "LlamaForCausalLM can share it between two answers, because the class was not tried "
        "(--share_prompts shares it)"
    ]


@pytest.fixture
def model_with_code(tmp_path: Path) -> Path:
    """A folder with a model's own code, which fails if it is run."""
    configuration = ModelConfig(from_config="llama", config_overrides="num_hidden_layers=2")
    config = configuration_of(configuration, None)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "modeling_own.py").write_text("raise SystemExit('it was run')")
    return tmp_path / "own"


def test_a_model_with_its_own_code_is_not_packed_and_the_code_not_run(
    model_with_code: Path,
) -> None:
    flags = f"--model_name_or_path {model_with_code} --trust_remote_code"
    settings = lt.parse(finetune.DEFAULTS, flags.split())
    settings.chat.resolve_packing(packing_support.packing_support(settings.model))
    assert settings.chat.packing is False
    assert settings.chat.packing_notes == [
        f"conversations are not packed: it is not known whether {model_with_code} keeps packed "
        "documents apart, because its code is not part of transformers (--packing packs them)"
    ]


def test_without_trust_the_class_of_transformers_decides(model_with_code: Path) -> None:
    flags = f"--model_name_or_path {model_with_code}"
    settings = lt.parse(finetune.DEFAULTS, flags.split())
    settings.chat.resolve_packing(packing_support.packing_support(settings.model))
    assert settings.chat.packing is True
    assert settings.chat.packing_notes == []


def test_a_model_that_does_not_exist_is_left_to_the_error_of_loading_it() -> None:
    settings = lt.parse(finetune.DEFAULTS, ["--model_name_or_path", "nowhere/at-all"])
    settings.chat.resolve_packing(packing_support.packing_support(settings.model))
    assert settings.chat.packing is None


# --- the flag


@pytest.mark.parametrize(
    ("flags", "packing"),
    [
        ("", None),
        ("--packing", True),
        ("--packing auto", None),
        ("--packing no", False),
        ("--no_packing", False),
        ("--no_packing false", True),
        ("--no-packing", False),
        ("--no_packing --packing auto", None),
    ],
)
def test_the_flag_has_three_values(flags: str, packing: bool | None) -> None:
    assert lt.parse(finetune.DEFAULTS, flags.split()).chat.packing is packing


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--packing perhaps", "--packing: 'perhaps' is not a value .* true, false or auto"),
        ("--packing=", "--packing: "),
        ("--no_packing auto", "--no_packing takes no auto; use --packing auto"),
        ("--pack", "unknown flag --pack"),
        ("--share_prompts 0.5", "--share_prompts: '0.5' is not a value"),
        ("--no_share_promts", "did you mean --no_share_prompts"),
    ],
)
def test_a_wrong_value_of_the_flag_is_an_error(flags: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        lt.parse(preference.DEFAULTS, flags.split())


@pytest.fixture
def set_verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the verdict on all classes."""

    def set_verdict(packs: bool, shares_prompts: bool) -> None:
        support = PackingSupport("SomeForCausalLM", packs=packs, shares_prompts=shares_prompts)
        monkeypatch.setattr(model_rows, "packing_support", lambda *_, **__: support)

    return set_verdict


@pytest.mark.parametrize(
    ("flag", "packing", "packs"), [("--packing", True, False), ("--no_packing", False, True)]
)
def test_the_flag_overrules_the_verdict(
    flag: str, packing: bool, packs: bool, chats: Path, set_verdict: Callable[..., None]
) -> None:
    set_verdict(packs=packs, shares_prompts=False)
    settings, rows = prepare_rows(finetune, chats, "llama", flag)
    assert settings.chat.packing is packing
    assert rows.is_packed == packing


@pytest.mark.parametrize(
    ("recipe", "data"), [(finetune, "chats"), (preference, "pairs")], ids=["finetune", "preference"]
)
def test_forced_packing_of_a_class_that_leaks_is_an_error_when_the_model_is_placed(
    recipe: ModuleType, data: str, request: pytest.FixtureRequest, accelerator: Any
) -> None:
    path = request.getfixturevalue(data)
    flags = f"--packing {overrides(LEAKING['mamba2'])}"
    settings, rows = prepare_rows(recipe, path, "mamba2", flags)
    assert rows.is_packed
    with pytest.raises(UserError, match=r"^Mamba2For\w+ lets .* see each other; use --no_packing"):
        place(accelerator, recipe.build(settings, rows, "no"))


def test_a_model_that_contradicts_its_verdict_is_an_error_that_names_the_flag(
    chats: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve = short_convolution._convolve

    def convolve_across_documents(x: torch.Tensor, documents: Any, **options: Any) -> torch.Tensor:
        one_document = type(documents)(starts=torch.zeros_like(documents.starts))
        return convolve(x, documents=one_document, **options)

    settings, rows = prepare_rows(finetune, chats, "lfm2", overrides(LFM2))
    monkeypatch.setattr(short_convolution, "_convolve", convolve_across_documents)
    with pytest.raises(UserError, match="use --no_packing"):
        place(accelerator, finetune.build(settings, rows, "no"))


# --- the cache and the data hash


def test_each_verdict_has_its_own_rows_and_data_hash(
    pairs: Path, set_verdict: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    hashes = set()
    for packs, shares_prompts in ((True, True), (True, False), (False, False)):
        set_verdict(packs, shares_prompts)
        for source in ("tokenised", "from the cache"):
            _, rows = prepare_rows(preference, pairs, "llama")
            assert f"; {source}\n" in capsys.readouterr().out
            assert rows.is_packed == packs
            assert rows.metadata.shared == shares_prompts
        hashes.add(rows.metadata.data_sha256)
    assert len(hashes) == 3


@pytest.mark.parametrize(("packs", "flag"), [(True, "--packing"), (False, "--no_packing")])
def test_a_verdict_makes_the_rows_of_the_flag(
    packs: bool,
    flag: str,
    chats: Path,
    set_verdict: Callable[..., None],
    capsys: pytest.CaptureFixture,
) -> None:
    set_verdict(packs=packs, shares_prompts=packs)
    _, by_verdict = prepare_rows(finetune, chats, "llama")
    capsys.readouterr()
    _, by_flag = prepare_rows(finetune, chats, "llama", flag)
    assert "; from the cache\n" in capsys.readouterr().out
    assert by_flag.metadata == by_verdict.metadata
