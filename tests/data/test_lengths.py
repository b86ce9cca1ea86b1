"""--max_length auto chooses a length from the data, and messages suggest one that fits."""

import json
from pathlib import Path

import pytest

import llmtrain as lt
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.layout import fit_to_rows
from llmtrain.training.rows import tokenize
from recipes import finetune, gpt
from tests.data.chat_records import chat_record, size_of
from tests.data.preparation import complaint, data_config, left_behind, write_records
from tests.launching import write_chats

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("some words")
    return path


def chats_of_lengths(path: Path, lengths: list[int]) -> Path:
    """Write conversations with these numbers of tokens."""
    overhead = size_of(chat_record("q", ""))
    return write_records(path, [chat_record("q", "x" * (length - overhead)) for length in lengths])


def tokenize_lengths(
    folder: Path, lengths: list[int], max_length: int | str, max_positions: int | None = None
) -> Tokenized:
    path = chats_of_lengths(folder / "chats.jsonl", lengths)
    model = None
    if max_positions is not None:
        sizes = f"max_position_embeddings={max_positions}"
        model = lt.ModelConfig(from_config="llama", config_overrides=sizes)
    return tokenize(data_config(path), max_length, ChatConfig(), model)


# --- auto


@pytest.mark.parametrize(
    ("longest", "max_positions", "expected"),
    # A row of 129 tokens has 128 inputs, because its last token is only a target.
    [(100, None, 128), (129, None, 128), (130, None, 192), (300, None, 320), (300, 150, 150)],
)
def test_auto_holds_the_conversations_up_to_the_positions_of_the_model(
    tmp_path, longest, max_positions, expected
):
    tokenized = tokenize_lengths(tmp_path, [40, 60, longest], "auto", max_positions=max_positions)
    assert tokenized.metadata.block_size == tokenized.positions == expected
    assert tokenized.metadata.audit.dropped == (longest > expected + 1)


def test_auto_holds_the_longer_answer_of_a_pair(tmp_path):
    long_pair = {"prompt": "q", "chosen": "x" * 70, "rejected": "y"}
    short_pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = write_records(tmp_path / "pairs.jsonl", [long_pair, short_pair])
    tokenized = tokenize(data_config(path), "auto", PairConfig())
    assert tokenized.metadata.block_size == 128
    assert tokenized.positions == 2 * 128 - 1  # of both answers; the last token is no input


def test_the_log_has_the_length_that_auto_has_chosen(tmp_path, capsys):
    lengths = [40, 60, 100, 200]
    tokenized = tokenize_lengths(tmp_path, lengths, "auto")
    assert "lengths   --max_length auto is 256\n" in capsys.readouterr().out
    same_length = tokenize_lengths(tmp_path, lengths, 256)
    assert same_length.metadata.data_sha256 == tokenized.metadata.data_sha256


def test_the_settings_of_a_run_have_the_length_that_auto_has_chosen(tmp_path):
    path = write_records(tmp_path / "chats.jsonl", [chat_record("q", "a" * 150)] * 4)
    flags = f"--dataset {path} --max_length auto --tokenizer byte".split()
    settings = lt.parse(finetune.DEFAULTS, flags)
    rows = finetune.tokenized(settings)
    assert rows.metadata.block_size == 192
    assert settings.model.max_length == "auto"
    fit_to_rows(settings, rows)
    assert settings.model.max_length == 192


def test_auto_is_an_error_for_text_and_without_targets(tmp_path, text_path, cache):
    chats = write_records(tmp_path / "chats.jsonl", [chat_record("q", "a")])
    for data, chat_config in (
        (data_config(text_path), None),
        (data_config(text_path), ChatConfig()),
        (data_config(text_path, eval_dataset=[str(chats)]), ChatConfig()),
    ):
        assert complaint(data, "auto", chat_config).startswith("--max_length auto ")

    question, answer = chat_record("q", "a")["messages"]
    write_records(chats, [{"messages": [question, {**answer, "weight": 0}]}])
    assert "1 turn not trained: the weight is 0" in complaint(
        data_config(text_path, chats), "auto", ChatConfig()
    )
    assert left_behind(cache) == []


# --- the length of the model


def test_the_configuration_of_a_model_limits_the_length_by_its_positions(tmp_path):
    configuration = {"model_type": "gpt2", "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    model = lt.parse(finetune.DEFAULTS, ["--from_config", str(tmp_path)]).model
    model.fit_max_length()
    assert model.max_positions() == 64
    assert model.max_length == 64


def test_the_default_micro_batch_holds_at_most_4096_tokens():
    for row_tokens, expected in ((256, 16), (257, 8), (9000, 1)):
        data = DataConfig()
        data.fit_micro_batch(row_tokens)
        assert data.per_device_train_batch_size == expected

    chosen = DataConfig(per_device_train_batch_size=16)
    chosen.origins = {"per_device_train_batch_size": "command line"}
    chosen.fit_micro_batch(1024)
    assert chosen.per_device_train_batch_size == 16


# --- the flag


@pytest.mark.parametrize("value", ["", "1.5", "Auto"])
def test_a_value_that_is_no_length_is_an_error(value):
    with pytest.raises(UserError, match="--max_length"):
        lt.parse(finetune.DEFAULTS, ["--max_length", value])


@pytest.mark.parametrize("typed", ["--block_size", "--max_length"])
def test_errors_name_the_flag_of_the_recipe(tmp_path, text_path, typed):
    text = f"--dataset {text_path} --tokenizer byte --eval_fraction 0 {typed} 500"
    with pytest.raises(UserError, match="--block_size 500 "):
        gpt.tokenized(lt.parse(gpt.DEFAULTS, text.split()))

    path = write_chats(tmp_path / "chats.jsonl", 12)
    chats = f"--from_config llama --tokenizer byte --eval_fraction 0 --dataset {path} {typed} 8"
    with pytest.raises(UserError, match="raise --max_length 8 to 128"):
        finetune.tokenized(lt.parse(finetune.DEFAULTS, chats.split()))


# --- lengths that are too short


def test_the_log_suggests_a_length_if_more_than_one_in_200_does_not_fit(tmp_path, capsys):
    tokenize_lengths(tmp_path, [50] * 199 + [600], 95)
    assert "are longer than" not in capsys.readouterr().out
    assert tokenize_lengths(tmp_path, [50] * 199 + [600], "auto").metadata.block_size == 64
    tokenize_lengths(tmp_path, [50] * 198 + [600] * 2, 95)
    assert "2 of 200 are longer than --max_length 95; --max_length auto" in capsys.readouterr().out


def test_the_error_if_no_conversation_fits_suggests_a_length(tmp_path):
    for max_length in (64, "auto"):
        with pytest.raises(UserError, match="raise --max_length 64 to 128"):
            tokenize_lengths(tmp_path, [66, 70, 100], max_length, max_positions=64)
