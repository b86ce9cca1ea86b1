"""Lengths of conversations: what ``--max_length auto`` chooses, and which length is suggested."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmtrain as lt
from llmtrain.data.audit import covering_length
from llmtrain.data.config import ChatConfig, DataConfig, PairConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from llmtrain.models.config import parse_max_length
from recipes import finetune, gpt
from tests.data.test_prepare import left_behind
from tests.data.test_sft import chat, size_of, write
from tests.launching import write_chats


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 1000])
def test_the_covering_length_is_the_smallest_multiple_of_64_that_holds_enough(
    seed: int, count: int
) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.8, count).astype(np.int64)
    covering = covering_length(lengths)
    assert covering % 64 == 0
    assert (lengths <= covering).mean() >= 0.995
    assert covering == 64 or (lengths <= covering - 64).mean() < 0.995


def test_without_examples_there_is_no_covering_length() -> None:
    assert covering_length(np.array([], np.int64)) == 0


def tokenize_lengths(folder: Path, lengths: list[int], max_length: Any, **flags: Any) -> Tokenized:
    """Tokenise conversations of one turn with some numbers of tokens."""
    overhead = size_of(chat("q", ""))
    records = [chat("q", "x" * (length - overhead)) for length in lengths]
    path = write(folder / "chats.jsonl", records)
    settings = {name: flags.pop(name) for name in ("eval_fraction",) if name in flags}
    config = DataConfig(dataset=[str(path)], tokenizer="byte", **{"eval_fraction": 0.0} | settings)
    max_positions = flags.pop("max_positions", None)
    return tokenize(config, max_length, ChatConfig(**flags), max_positions=max_positions)


@pytest.mark.parametrize(
    ("longest", "max_positions", "expected"),
    [(100, None, 128), (129, None, 128), (130, None, 192), (300, None, 320), (300, 150, 150)],
)
def test_auto_holds_the_conversations_up_to_the_positions_of_the_model(
    tmp_path: Path, longest: int, max_positions: int | None, expected: int
) -> None:
    made = tokenize_lengths(tmp_path, [40, 60, longest], "auto", max_positions=max_positions)
    assert made.metadata.block_size == made.positions == expected
    assert made.metadata.audit is not None
    assert made.metadata.audit["overlong"] == (longest > expected + 1)


def test_auto_is_found_in_the_cache_and_says_what_it_has_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for outcome in ("tokenised", "from the cache"):
        made = tokenize_lengths(tmp_path, [40, 60, 100, 200], "auto")
        out = capsys.readouterr().out
        assert f"; {outcome}\n" in out
        assert "lengths   --max_length auto is 256\n" in out
    numbered = tokenize_lengths(tmp_path, [40, 60, 100, 200], 256)
    assert numbered.metadata.data_sha256 == made.metadata.data_sha256


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_length_that_fits_is_named_if_more_than_one_in_200_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overlong: str
) -> None:
    for number, is_told in ((1, False), (2, True)):
        lengths = [50] * (200 - number) + [600] * number
        tokenize_lengths(tmp_path, lengths, 95, overlong=overlong, on_bad_row="skip")
        out = capsys.readouterr().out
        assert ("are longer than" in out) == is_told
    assert (
        "lengths   2 of 200 are longer than --max_length 95; --max_length 640 holds 99.5%\n" in out
    )


@pytest.mark.parametrize("lengths", [[66], [66, 70, 100]])
@pytest.mark.parametrize("max_length", [64, "auto"])
def test_conversations_that_are_all_overlong_are_told_a_length_that_holds_them(
    tmp_path: Path, lengths: list[int], max_length: Any
) -> None:
    subject = "the only conversation is" if len(lengths) == 1 else "all 3 conversations are"
    with pytest.raises(UserError) as error:
        tokenize_lengths(tmp_path, lengths, max_length, max_positions=64)
    assert str(error.value).endswith(
        f": {subject} longer than --max_length 64; set --max_length 128, if the model has as many positions, or --overlong truncate."
    )


def test_pairs_that_are_all_overlong_are_told_the_ways_out(tmp_path: Path) -> None:
    record = {"prompt": "q", "chosen": "x" * 70, "rejected": "y"}
    path = write(tmp_path / "pairs.jsonl", [record])
    config = DataConfig(dataset=[str(path)], tokenizer="byte", eval_fraction=0.0)
    for overlong, expected in (
        (
            "drop",
            r"the only pair is longer than --max_length 64; set --max_length 128, if the model has as many positions, or ",
        ),
        ("error", r"; raise it, or set --overlong drop or truncate\."),
    ):
        with pytest.raises(UserError, match=expected):
            tokenize(config, 64, PairConfig(overlong=overlong))


@pytest.mark.parametrize("chat_type", [ChatConfig, None])
def test_auto_is_not_for_text(
    tmp_path: Path, cache: Path, chat_type: type[ChatConfig] | None
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    config = DataConfig(dataset=[str(tmp_path / "a.txt")], tokenizer="byte")
    with pytest.raises(UserError, match=r"--max_length auto is for conversations, but .* is text"):
        tokenize(config, "auto", chat_type() if chat_type else None)
    assert left_behind(cache) == []


def test_auto_is_not_for_text_that_is_evaluated_on_conversations(
    tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    chats = write(tmp_path / "chats.jsonl", [chat("q", "a")])
    config = DataConfig(
        dataset=[str(tmp_path / "a.txt")], eval_dataset=[str(chats)], tokenizer="byte"
    )
    with pytest.raises(UserError, match=r"auto is for conversations, but .*a\.txt is text"):
        tokenize(config, "auto", ChatConfig())
    assert left_behind(cache) == []


def test_auto_without_a_target_is_one_line_beside_text_too(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    messages = chat("q", "a")["messages"]
    untrained = {"messages": [messages[0], {**messages[1], "weight": 0}]}
    chats = write(tmp_path / "chats.jsonl", [untrained])
    config = DataConfig(
        dataset=[str(tmp_path / "a.txt"), str(chats)], tokenizer="byte", eval_fraction=0.0
    )
    with pytest.raises(UserError, match=r"would be trained \(.*; 1 turn has weight 0\)"):
        tokenize(config, "auto", ChatConfig())
    assert left_behind(cache) == []


def test_auto_measures_the_longer_answer_of_a_pair(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": "q", "chosen": "x" * 70, "rejected": "y"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ],
    )
    config = DataConfig(dataset=[str(path)], tokenizer="byte", eval_fraction=0.0)
    made = tokenize(config, "auto", PairConfig())
    assert made.metadata.block_size == 128
    assert made.positions == 2 * 128 - 1


def test_a_configuration_of_another_model_limits_the_length_by_its_positions(
    tmp_path: Path,
) -> None:
    config = {"model_type": "gpt2", "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--from_config", str(tmp_path)]
    model = lt.parse(finetune.DEFAULTS, flags).model
    model.fit_max_length()
    assert model.max_positions() == model.max_length == 64

    overrides = ["--config_overrides", "n_positions=128"]
    assert lt.parse(finetune.DEFAULTS, [*flags, *overrides]).model.max_positions() == 128


@pytest.mark.parametrize("word", ["", "x", "1.5", "Auto", "1e3"])
def test_a_word_that_is_no_length_is_refused_in_one_line(word: str) -> None:
    defaults = finetune.DEFAULTS
    with pytest.raises(UserError) as error:
        lt.parse(defaults, ["--max_length", word])
    assert f"--max_length: '{word}' is neither a number of tokens nor auto" in str(error.value)


@pytest.mark.parametrize("flag", ["--max_length", "--block_size"])
def test_the_name_of_the_other_recipe_is_accepted(flag: str) -> None:
    settings = lt.parse(finetune.DEFAULTS, [flag, "96"])
    assert (settings.model.max_length, settings.model.is_set("max_length")) == (96, True)
    settings_of_gpt = lt.parse(gpt.DEFAULTS, [flag, "96"])
    assert settings_of_gpt.model.block_size == 96
    assert parse_max_length("auto") == "auto"


def test_a_recipe_records_the_length_that_auto_has_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [chat("q", "a" * 150) for _ in range(4)])
    flags = ["--dataset", str(path), "--max_length", "auto", "--tokenizer", "byte"]
    settings = lt.parse(finetune.DEFAULTS, flags)
    rows = finetune.tokenized(settings)
    assert settings.model.max_length == rows.metadata.block_size == settings.model.row_length == 192


@pytest.mark.parametrize(
    ("row_tokens", "is_set", "expected"),
    [
        (128, False, 16),
        (256, False, 16),
        (257, False, 8),
        (1024, False, 4),
        (9000, False, 1),
        (1024, True, 16),
    ],
)
def test_the_default_micro_batch_holds_4096_tokens_at_most(
    row_tokens: int, is_set: bool, expected: int
) -> None:
    config = DataConfig()
    if is_set:
        config.origins = {"per_device_train_batch_size": "command line"}
    config.fit_micro_batch(row_tokens)
    assert config.per_device_train_batch_size == expected


# --- the flag as the user wrote it


def recipe_error(recipe: Any, *argv: str) -> str:
    """The message with which a recipe refuses its data."""
    settings = lt.parse(recipe.DEFAULTS, list(argv))
    with pytest.raises(UserError) as caught:
        recipe.tokenized(settings)
    return str(caught.value)


@pytest.mark.parametrize("flag", ["--block_size", "--max_length", "--max-length"])
def test_a_text_that_is_too_short_names_the_flag_by_its_own_name(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a few words\n" * 4)
    argv = ["--dataset", str(path), "--tokenizer", "byte", "--eval_fraction", "0"]
    message = recipe_error(gpt, *argv, flag, "500")
    assert message.startswith("--block_size 500 is larger than the training text (")


@pytest.mark.parametrize("flag", ["--block_size", "--max_length"])
def test_overlong_conversations_name_the_flag_by_its_own_name(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_chats(tmp_path / "chats.jsonl", 12))
    argv = ["--from_config", "llama", "--tokenizer", "byte", "--eval_fraction", "0"]
    message = recipe_error(finetune, *argv, "--dataset", path, flag, "8")
    assert (
        " conversations are longer than --max_length 8; set --max_length 128, if the model has as many positions, or "
        in message
    )

    settings = lt.parse(finetune.DEFAULTS, [*argv, "--dataset", path, flag, "32"])
    finetune.tokenized(settings)
    out = capsys.readouterr().out
    assert "are longer than --max_length 32; --max_length 128 holds 99.5%\n" in out


def test_eval_data_that_are_all_overlong_are_told_the_length_that_holds_them(
    tmp_path: Path,
) -> None:
    overhead = size_of(chat("q", ""))
    train = write(tmp_path / "train.jsonl", [chat("q", "x")])
    eval = write(
        tmp_path / "eval.jsonl",
        [chat("q", "x" * (length - overhead)) for length in (151, 301)],
    )
    data = DataConfig(dataset=[str(train)], eval_dataset=[str(eval)], tokenizer="byte")
    with pytest.raises(UserError) as caught:
        tokenize(data, 95, ChatConfig())
    assert str(caught.value) == (
        f"--eval_dataset {eval}: no record can be used for evaluation (0 of 2 conversations: 2 "
        "overlong dropped (100.0% of the tokens), 0 without a target token and 0 bad ones left "
        "out); 2 of 2 are longer than --max_length 95; --max_length 320 holds 99.5%."
    )
