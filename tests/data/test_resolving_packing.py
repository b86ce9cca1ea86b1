"""Rows are packed if the model class is known to keep documents apart."""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llmtrain as lt
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.models import model_classes
from llmtrain.models.config import ModelConfig
from llmtrain.parallel.placement import move_to_devices
from recipes import finetune, preference
from tests.data.preparation import log_lines, write_records

pytestmark = pytest.mark.usefixtures("cache")
Capture = pytest.CaptureFixture[str]

SMALL = "hidden_size=32,num_hidden_layers=2"
ATTENTION = "intermediate_size=32,num_attention_heads=2,num_key_value_heads=1"
# Small models of classes with a verdict.
MODELS = {
    "mamba2": f"{SMALL},num_heads=4,head_dim=16,state_size=8,n_groups=1,chunk_size=16",
    "llama": f"{SMALL},{ATTENTION},head_dim=16",
    "lfm2": f"{SMALL},{ATTENTION},layer_types=[conv,full_attention]",
    "gemma2": f"{SMALL},{ATTENTION},head_dim=16",
}
FIELDS = {finetune: ("prompt", "completion"), preference: ("prompt", "chosen", "rejected")}


def prepare_rows(
    recipe: ModuleType, folder: Path, family: str, flags: str = ""
) -> tuple[lt.Settings, Tokenized]:
    """Return the settings of a recipe for twelve records, and the rows that it makes."""
    records = [{name: f"{name} {i}" for name in FIELDS[recipe]} for i in range(12)]
    path = write_records(folder / "records.jsonl", records)
    common = (
        f"--dataset {path} --from_config {family} --config_overrides {MODELS[family]} "
        "--tokenizer byte --chat_template chatml --block_size 100 --eval_fraction 0"
    )
    settings = lt.parse(recipe.DEFAULTS, f"{common} {flags}".split())
    sections = copy.deepcopy([settings.data, settings.model, settings.chat])
    rows = recipe.tokenized(settings)
    assert [settings.data, settings.model, settings.chat] == sections, "they stay as they are"
    return settings, rows


# --- the verdict on a class


@pytest.mark.parametrize(
    ("recipe", "family", "is_packed", "is_shared", "class_in_log"),
    [
        pytest.param(finetune, "mamba2", False, False, "Mamba2ForCausalLM", id="leaks"),
        pytest.param(finetune, "llama", True, False, "", id="attention"),
        pytest.param(finetune, "lfm2", True, False, "", id="convolution"),
        pytest.param(preference, "mamba2", False, False, "Mamba2ForCausalLM", id="pairs-leak"),
        pytest.param(preference, "lfm2", True, True, "", id="pairs-share-prompts"),
        pytest.param(preference, "gemma2", True, False, "", id="pairs-share-none"),
    ],
)
def test_the_verdict_on_a_class_decides_and_is_logged(
    recipe: ModuleType,
    family: str,
    is_packed: bool,
    is_shared: bool,
    class_in_log: str,
    tmp_path: Path,
    accelerator: Any,
    capsys: Capture,
) -> None:
    settings, rows = prepare_rows(recipe, tmp_path, family)
    move_to_devices(accelerator.ranks, recipe.build(settings, rows, "no"))

    assert rows.decided["packing"] is rows.is_packed is is_packed
    assert rows.metadata.shared == is_shared
    assert (rows.metadata.train_rows < 12) == is_packed
    log = log_lines(capsys, "packing")
    assert len(log) == bool(class_in_log)
    assert class_in_log in "".join(log)


# --- classes without a verdict


def test_a_class_that_was_not_tried_is_not_packed_and_the_log_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    verdicts = tmp_path / "verdicts.json"
    verdicts.write_text('{"classes": {}}')
    monkeypatch.setattr(model_classes, "VERDICTS", verdicts)

    _, rows = prepare_rows(finetune, tmp_path, "llama")
    assert not rows.is_packed
    assert "--packing" in log_lines(capsys, "packing")[0]

    _, rows = prepare_rows(preference, tmp_path, "llama", "--packing")
    assert rows.is_packed
    assert not rows.metadata.shared


@pytest.mark.parametrize("trusts_code", [True, False])
def test_a_model_is_packed_only_if_the_code_of_transformers_runs(
    tmp_path: Path, trusts_code: bool
) -> None:
    config = ModelConfig(from_config="llama").configuration()
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config.save_pretrained(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it was run')")
    flags = ["--model_name_or_path", str(tmp_path)]
    if trusts_code:
        flags.append("--trust_remote_code")

    settings = lt.parse(finetune.DEFAULTS, flags)
    support = model_classes.packing_support(settings.model)

    assert support is not None
    assert bool(support.packing_problem) == trusts_code


def test_a_model_that_does_not_exist_is_left_to_the_error_of_loading_it() -> None:
    settings = lt.parse(finetune.DEFAULTS, ["--model_name_or_path", "nowhere/at-all"])
    assert model_classes.packing_support(settings.model) is None


# --- the flag


@pytest.mark.parametrize(
    ("flags", "packing"),
    [("--packing", True), ("--no_packing", False), ("--no_packing --packing auto", None)],
)
def test_the_flag_has_three_values(flags: str, packing: bool | None) -> None:
    assert lt.parse(finetune.DEFAULTS, flags.split()).chat.packing is packing


@pytest.mark.parametrize(
    ("flags", "named"), [("--packing perhaps", "--packing"), ("--no_packing auto", "'auto'")]
)
def test_a_wrong_value_of_the_flag_is_an_error_that_names_it(flags: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        lt.parse(finetune.DEFAULTS, flags.split())


def test_the_flag_overrules_the_verdict(tmp_path: Path) -> None:
    settings, rows = prepare_rows(finetune, tmp_path, "llama", "--no_packing")
    assert settings.chat.packing is False
    assert not rows.is_packed


def test_forced_packing_of_a_class_that_leaks_is_an_error_when_the_model_is_placed(
    tmp_path: Path, accelerator: Any
) -> None:
    settings, rows = prepare_rows(finetune, tmp_path, "mamba2", "--packing")
    assert rows.is_packed
    with pytest.raises(UserError, match=r"^Mamba2For\w+ .*--no_packing"):
        move_to_devices(accelerator.ranks, finetune.build(settings, rows, "no"))
