"""Tokenizers that are trained on the data decode to the same text, also after save and load."""

from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError

TEXTS = [
    "plain words, and some more words.",
    "it 's done . do n't , stop ! ünï — „quotes“ …",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u202eright to left\u202c",
    "line\nline\r\nline\rline\n\n\n\ttab\ttab\t\n",
    "  two    four        eight  ",
    "\n",
    "x",
    "\x00\x01\x1b\x7f\x1c\x85\u2028\u2029\u00a0\u3000\ufeff\ufffd\U0010ffff",
    "def f(x):\n    return  x**2  # 1_000.5e-3\n",
    "before<|endoftext|><|endoftext|> < | endoftext | >",
]
SPECS = ["char", "byte", "bpe:257", "bpe:300"]


def make(
    spec: str, train: list[str] = TEXTS, eval: list[str] | None = None
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on training texts, beside eval texts."""
    all_texts = train + (eval or [])
    trained = tok.train_tokenizer(spec, train=iter(train), all_texts=lambda: iter(all_texts))
    return tok.as_pretrained(trained, block_size=32)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode as for rows: no text stands for a special token."""
    tokenizer.backend_tokenizer.encode_special_tokens = True
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


class SavedTokenizer(NamedTuple):
    """A tokenizer, and the same tokenizer after it was saved and loaded."""

    trained: PreTrainedTokenizerFast
    loaded: PreTrainedTokenizerFast


@pytest.fixture(scope="module", params=SPECS)
def saved(request, tmp_path_factory) -> SavedTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = make(request.param)
    trained.save_pretrained(folder)
    return SavedTokenizer(trained, AutoTokenizer.from_pretrained(folder))


# --- texts and tokens


def test_tokens_decode_to_the_same_text_also_after_save_and_load(saved):
    for text in TEXTS:
        ids = encode(saved.trained, text)
        assert encode(saved.loaded, text) == ids
        assert saved.trained.decode(ids) == text
        assert saved.loaded.decode(ids) == text
        assert saved.trained.eos_token_id not in ids
        assert all(0 <= token < len(saved.trained) for token in ids)


def test_char_has_a_token_per_character_and_byte_one_per_byte():
    char = make("char")
    byte = make("byte", ["only ascii words here"])
    bpe = make("bpe:300", ["only ascii words here"])
    assert len(byte) == 257
    for text in TEXTS:
        assert len(encode(char, text)) == len(text)
        assert len(encode(byte, text)) == len(text.encode())
        for tokenizer in (byte, bpe):
            assert tokenizer.decode(encode(tokenizer, text)) == text


# --- training


def test_bpe_has_the_chosen_size_if_the_text_has_enough_pairs():
    words = [f"word{i} other{i * 7}" for i in range(200)]
    assert len(make("bpe:257", words)) == 257
    assert len(make("bpe:320", words)) == 320
    assert len(make("bpe:400", ["ab"])) < 400


def test_bpe_learns_no_merges_from_eval_texts():
    train = ["one two three " * 50]
    eval = ["zzzz qqqq " * 500]
    without_eval = tok.digest(make("bpe:300", train))
    assert tok.digest(make("bpe:300", train)) == without_eval, "it is the same every time"
    assert tok.digest(make("bpe:300", train, eval)) == without_eval
    assert tok.digest(make("bpe:300", eval)) != without_eval


# --- the files of Hugging Face


def test_a_loaded_tokenizer_is_the_one_that_was_saved(saved):
    trained, loaded = saved
    assert tok.digest(loaded) == tok.digest(trained)
    assert loaded.is_fast
    assert loaded.get_vocab() == trained.get_vocab()
    assert loaded.model_max_length == 32
    assert loaded.eos_token_id == trained.eos_token_id
    assert loaded.bos_token == loaded.eos_token == loaded.unk_token == "<|endoftext|>"


def test_outside_of_rows_the_text_of_a_special_token_is_the_token(saved):
    loaded = saved.loaded
    loaded.backend_tokenizer.encode_special_tokens = False
    words = loaded("some words")["input_ids"]
    assert loaded.decode(words) == "some words"
    assert loaded.eos_token_id not in words
    ids = loaded("some words<|endoftext|>")["input_ids"]
    assert ids == [*words, loaded.eos_token_id]
    assert loaded.decode(ids, skip_special_tokens=True) == "some words"


# --- --tokenizer


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:256", "bpe:-300", "bpe:3e2", "byte:300"])
def test_a_size_that_a_kind_cannot_have_is_an_error(spec):
    with pytest.raises(UserError, match=f"--tokenizer {spec}: "):
        tok.vocabulary_size(spec)


def test_a_folder_called_like_a_kind_is_loaded_instead_of_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tok.is_trained("char")
    (tmp_path / "char").mkdir()
    assert not tok.is_trained("char")


@pytest.mark.parametrize(
    "name", ["nobody/of-this-name", "no-such-tokenizer", "empty", "gpt2", "words"]
)
def test_a_name_without_a_usable_tokenizer_is_an_error_of_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    # transformers makes a tokenizer for GPT-2 whose only token is end-of-text.
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "gpt2")
    model = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    without_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    without_eos.save_pretrained(tmp_path / "words")

    with pytest.raises(UserError) as error:
        tok.load_tokenizer(name)
    message = str(error.value)
    assert message.startswith(name)
    assert "--tokenizer" in message
    assert "\n" not in message
