"""Rows are packed if the model class is known to keep documents apart."""

import json
from collections.abc import Callable
from pathlib import Path
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

SMALL = "hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=1,"
MIXER = "mamba_n_heads=4,mamba_d_head=16,mamba_d_state=8,mamba_chunk_size=16"
HYBRIDS = {
    "bamba": SMALL + MIXER + ",num_hidden_layers=2,attn_layer_indices=[1]",
    "falcon_h1": SMALL + "num_hidden_layers=2,mamba_d_ssm=32,mamba_n_heads=4,mamba_d_head=8,"
    "mamba_d_state=8,mamba_chunk_size=16",
    "zamba2": "hidden_size=32,intermediate_size=32,num_attention_heads=2,num_key_value_heads=2,"
    "num_hidden_layers=3,layers_block_type=[linear_attention,hybrid,hybrid],n_mamba_heads=4,"
    "mamba_headdim=16,mamba_d_state=8,chunk_size=16,attention_head_dim=32,"
    "attention_hidden_size=64,adapter_rank=4",
    "nemotron_h": SMALL + "head_dim=16,layers_block_type=[linear_attention,full_attention,mlp],"
    "mamba_num_heads=4,mamba_head_dim=16,n_groups=1,ssm_state_size=8,chunk_size=16",
    "granitemoehybrid": SMALL + MIXER + ",num_hidden_layers=2,num_local_experts=0,"
    "layer_types=[linear_attention,full_attention],shared_intermediate_size=32",
    "qwen3_next": SMALL + "head_dim=16,num_hidden_layers=2,num_experts=4,num_experts_per_tok=2,"
    "layer_types=[linear_attention,full_attention],linear_num_key_heads=2,"
    "linear_num_value_heads=2,linear_key_head_dim=16,linear_value_head_dim=16,"
    "moe_intermediate_size=16,shared_expert_intermediate_size=16",
    "jamba": SMALL + "num_hidden_layers=2,attn_layer_period=2,attn_layer_offset=1,num_experts=2,"
    "num_experts_per_tok=1,mamba_d_state=8,mamba_dt_rank=4,use_mamba_kernels=false",
    "mamba2": "hidden_size=32,num_hidden_layers=2,num_heads=4,head_dim=16,state_size=8,n_groups=1,"
    "chunk_size=16",
}
LFM2 = SMALL + "num_hidden_layers=3,layer_types=[conv,full_attention,conv]"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    records = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(12)]
    return written(tmp_path / "chats.jsonl", records)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    records = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(12)]
    return written(tmp_path / "pairs.jsonl", records)


def written(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepared(recipe: Any, data: Path, family: str, *flags: str) -> tuple[Any, Tokenized]:
    """The settings of a recipe and its rows, as the recipe makes them."""
    argv = ["--dataset", str(data), "--from_config", family, "--tokenizer", "byte"]
    argv += ["--chat_template", "chatml", "--block_size", "48", *flags]
    settings = lt.parse(recipe.DEFAULTS, argv)
    return settings, recipe.tokenized(settings)


def packing_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("packing ")]


# --- what a run does


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_class_that_leaks_trains_unpacked_and_one_line_says_so(
    family: str, chats: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    settings, rows = prepared(
        finetune, chats, family, "--config_overrides", HYBRIDS[family], "--eval_fraction", "0"
    )
    bundle = place(accelerator, finetune.build(settings, rows, "no"))
    (line,) = packing_lines(capsys.readouterr().out)
    name = bundle.model.own_class.__name__
    assert line == (
        f"packing   conversations are not packed: {name} lets the documents of a packed row see "
        "each other"
    )
    assert (settings.chat.packing, rows.is_packed) == (False, False)
    assert rows.metadata.train_rows == 12

    batch = {
        name: torch.tensor([rows.train[row][name] for row in range(4)])
        for name in ("input_ids", "labels")
    }
    optimizer = torch.optim.SGD(bundle.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = bundle.model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_class_that_keeps_documents_apart_is_packed_and_no_line_is_needed(
    family: str, chats: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    overrides = LFM2 if family == "lfm2" else SMALL + "num_hidden_layers=2,head_dim=16"
    settings, rows = prepared(finetune, chats, family, "--config_overrides", overrides)
    place(accelerator, finetune.build(settings, rows, "no"))
    assert not packing_lines(capsys.readouterr().out)
    assert (settings.chat.packing, rows.is_packed) == (True, True)
    assert rows.metadata.train_rows < 12


@pytest.mark.parametrize("recipe", [finetune, preference])
def test_packing_that_is_forced_on_a_class_that_leaks_is_an_error_of_one_line(
    recipe: Any, chats: Path, pairs: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    data = chats if recipe is finetune else pairs
    flags = ["--packing", "--config_overrides", HYBRIDS["mamba2"]]
    settings, rows = prepared(recipe, data, "mamba2", *flags)
    assert rows.is_packed
    with pytest.raises(UserError, match=r"^Mamba2For\w+ lets .* see each other; use --no_packing"):
        place(accelerator, recipe.build(settings, rows, "no"))


def test_a_verdict_that_the_model_contradicts_is_an_error_that_names_the_flag(
    chats: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, rows = prepared(finetune, chats, "lfm2", "--config_overrides", LFM2)
    convolve = short_convolution._convolve
    monkeypatch.setattr(
        short_convolution,
        "_convolve",
        lambda x, documents, **others: convolve(x, documents=of_whole_rows(documents), **others),
    )
    with pytest.raises(UserError, match="use --no_packing"):
        place(accelerator, finetune.build(settings, rows, "no"))


def of_whole_rows(documents: Any) -> Any:
    return type(documents)(starts=torch.zeros_like(documents.starts))


@pytest.mark.parametrize("flag", ["--no_packing", "--packing"])
def test_a_user_s_own_choice_stands_whatever_the_verdict(
    flag: str, chats: Path, verdict: Callable[[bool, bool], None]
) -> None:
    verdict(flag == "--no_packing", False)
    settings, rows = prepared(finetune, chats, "llama", flag)
    assert rows.is_packed == settings.chat.packing == (flag == "--packing")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--packing", "perhaps"], "--packing: 'perhaps' is not a value .* true, false or auto"),
        (["--packing="], "--packing: "),
        (["--no_packing", "auto"], "--no_packing takes no auto; use --packing auto"),
        (["--pack"], "unknown flag --pack"),
        (["--share_prompts", "0.5"], "--share_prompts: '0.5' is not a value"),
        (["--no_share_promts"], "did you mean --no_share_prompts"),
    ],
)
def test_a_wrong_value_is_an_error_of_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lt.parse(preference.DEFAULTS, flags)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--packing"], True),
        (["--packing", "auto"], None),
        (["--packing", "no"], False),
        (["--no_packing"], False),
        (["--no_packing", "false"], True),
        (["--no-packing"], False),
        (["--no_packing", "--packing", "auto"], None),
    ],
)
def test_the_switch_has_three_values(argv: list[str], expected: bool | None) -> None:
    assert lt.parse(finetune.DEFAULTS, argv).chat.packing is expected


@pytest.mark.parametrize(
    ("family", "overrides", "shares", "line"),
    [
        ("lfm2", LFM2, True, ""),
        (
            "gemma2",
            SMALL + "head_dim=16,num_hidden_layers=2",
            False,
            "packing   each answer has its own copy of the prompt: Gemma2ForCausalLM cannot share "
            "it between two answers",
        ),
    ],
)
def test_two_answers_share_a_prompt_if_the_class_keeps_them_apart(
    family: str,
    overrides: str,
    shares: bool,
    line: str,
    pairs: Path,
    accelerator: Any,
    capsys: pytest.CaptureFixture,
) -> None:
    settings, rows = prepared(preference, pairs, family, "--config_overrides", overrides)
    place(accelerator, preference.build(settings, rows, "no"))
    assert packing_lines(capsys.readouterr().out) == ([line] if line else [])
    assert (rows.is_packed, rows.metadata.shared) == (True, shares)
    assert settings.chat.share_prompts is shares


def test_answers_of_a_class_that_leaks_have_halves_of_rows(
    pairs: Path, accelerator: Any, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--config_overrides", HYBRIDS["mamba2"]]
    settings, rows = prepared(preference, pairs, "mamba2", *flags)
    place(accelerator, preference.build(settings, rows, "no"))
    (line,) = packing_lines(capsys.readouterr().out)
    assert line.startswith("packing   pairs are not packed: Mamba2ForCausalLM lets")
    assert (rows.is_packed, rows.metadata.shared) == (False, False)


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of classes without any class."""
    path = tmp_path / "verdicts.json"
    path.write_text('{"classes": {}}')
    monkeypatch.setattr(packing_support, "VERDICTS", path)


@pytest.mark.usefixtures("verdicts")
def test_a_class_that_is_not_on_the_list_is_not_packed_and_the_line_names_the_flag(
    chats: Path, capsys: pytest.CaptureFixture
) -> None:
    _, rows = prepared(finetune, chats, "llama")
    assert packing_lines(capsys.readouterr().out) == [
        "packing   conversations are not packed: it is not known whether LlamaForCausalLM keeps "
        "packed documents apart, because the class was not tried (--packing packs them)"
    ]
    assert not rows.is_packed


@pytest.mark.usefixtures("verdicts")
def test_sharing_prompts_that_was_not_tried_says_so(
    pairs: Path, capsys: pytest.CaptureFixture
) -> None:
    _, rows = prepared(preference, pairs, "llama", "--packing")
    assert rows.is_packed
    assert packing_lines(capsys.readouterr().out) == [
        "packing   each answer has its own copy of the prompt: it is not known whether "
        "LlamaForCausalLM can share it between two answers, because the class was not tried "
        "(--share_prompts shares it)"
    ]


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_model_s_own_is_not_packed_and_not_run(trusted: bool, tmp_path: Path) -> None:
    """Without --trust_remote_code the class of transformers is trained, which may be packed."""
    config = configuration_of(ModelConfig(from_config="llama", config_overrides=SMALL[:-1]), None)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "modeling_own.py").write_text("raise SystemExit('it was run')")
    flags = ["--model_name_or_path", str(tmp_path / "own")]
    settings = lt.parse(finetune.DEFAULTS, [*flags, *["--trust_remote_code"] * trusted])
    settings.chat.resolve_packing(packing_support.packing_support(settings.model))
    assert settings.chat.packing is not trusted
    note = (
        f"conversations are not packed: it is not known whether {tmp_path / 'own'} keeps packed "
        "documents apart, because its code is not part of transformers (--packing packs them)"
    )
    assert settings.chat.packing_notes == ([note] if trusted else [])


def test_a_model_that_does_not_exist_is_left_to_the_error_of_loading_it() -> None:
    settings = lt.parse(finetune.DEFAULTS, ["--model_name_or_path", "nowhere/at-all"])
    settings.chat.resolve_packing(packing_support.packing_support(settings.model))
    assert settings.chat.packing is None


def test_nothing_is_said_of_conversations_if_the_data_are_text(
    text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--config_overrides", HYBRIDS["mamba2"], "--eval_fraction", "0"]
    settings = lt.parse(finetune.DEFAULTS, ["--from_config", "mamba2", *flags])
    settings.data.dataset = [str(text_file)]
    settings.data.tokenizer = "byte"
    settings.model.max_length = 48
    finetune.tokenized(settings)
    out = capsys.readouterr().out
    assert "task      continued pretraining: the records are text, not conversations" in out
    assert packing_lines(out) == []


# --- the cache of rows, and the fingerprint


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    def choose(packs: bool, shares: bool) -> None:
        support = PackingSupport("SomeForCausalLM", packs=packs, shares_prompts=shares)
        monkeypatch.setattr(model_rows, "packing_support", lambda *_, **__: support)

    return choose


def test_another_verdict_makes_other_rows_and_another_fingerprint(
    pairs: Path, verdict: Callable[[bool, bool], None], capsys: pytest.CaptureFixture
) -> None:
    hashes = []
    for packs, shares in ((True, True), (True, False), (False, False)):
        for outcome in ("tokenised", "from the cache"):
            verdict(packs, shares)
            _, rows = prepared(preference, pairs, "llama")
            assert f"; {outcome}\n" in capsys.readouterr().out, (packs, shares)
            assert (rows.is_packed, rows.metadata.shared) == (packs, packs and shares)
        hashes.append(rows.metadata.data_sha256)  # which the fingerprint of the run holds
    assert len({*hashes}) == 3


def test_what_a_verdict_chooses_is_what_the_flag_chooses(
    chats: Path, verdict: Callable[[bool, bool], None], capsys: pytest.CaptureFixture
) -> None:
    for packs, flag in ((True, "--packing"), (False, "--no_packing")):
        verdict(packs, packs)
        _, rows = prepared(finetune, chats, "llama")
        _, forced = prepared(finetune, chats, "llama", flag)
        assert forced.metadata == rows.metadata
        assert capsys.readouterr().out.count("; from the cache\n") == 1
