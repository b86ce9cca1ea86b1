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
    "it 's done . do n't , stop ! he 'll",
    "ünï ñandú — „quotes“ … naïve",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u202eright to left\u202c",
    "line\nline\r\nline\rline\n\n\n\ttab\ttab\t\n",
    "  two    four        eight  ",
    " ",
    "\n",
    "x",
    "\x00\x01\x1b\x7f\x1c\x85\u2028\u2029\u00a0\u3000\ufeff\ufffd\U0010ffff",
    "def f(x):\n    return  x**2  # 1_000.5e-3\n",
    "before<|endoftext|>after",
    "<|endoftext|>",
    "<|endoftext|><|endoftext|> < | endoftext | >",
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


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_decode_to_the_same_text_also_after_save_and_load(saved, text):
    ids = encode(saved.trained, text)
    assert encode(saved.loaded, text) == ids
    assert saved.trained.decode(ids) == text
    assert saved.loaded.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_contains_the_end_of_text_token(saved, text):
    ids = encode(saved.trained, text)
    assert saved.trained.eos_token_id not in ids
    assert all(0 <= token < len(saved.trained) for token in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_char_has_a_token_per_character_and_byte_one_per_byte(text):
    assert len(encode(make("char"), text)) == len(text)
    assert len(encode(make("byte"), text)) == len(text.encode())


@pytest.mark.parametrize("spec", ["byte", "bpe:300"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_that_the_training_text_does_not_have_are_encoded(spec, text):
    tokenizer = make(spec, ["only ascii words here"])
    assert tokenizer.decode(encode(tokenizer, text)) == text


# --- training


def test_bpe_has_the_chosen_size_if_the_text_has_enough_pairs():
    words = [f"word{i} other{i * 7}" for i in range(200)]
    assert len(make("bpe:257", words)) == 257
    assert len(make("bpe:320", words)) == 320
    assert len(make("bpe:400", ["ab"])) < 400


def test_byte_has_256_bytes_and_end_of_text():
    assert len(make("byte")) == 257


def test_char_has_tokens_for_the_characters_of_eval_texts():
    tokenizer = make("char", ["abc"], eval=["xyz漢"])
    ids = encode(tokenizer, "cab漢zyx")
    assert tokenizer.decode(ids) == "cab漢zyx"
    assert tokenizer.eos_token_id not in ids
    assert len(tokenizer) == 1 + len("abcxyz漢")


def test_bpe_learns_no_merges_from_eval_texts():
    train = ["one two three " * 50]
    eval = ["zzzz qqqq " * 500]
    without_eval = tok.digest(make("bpe:300", train))
    assert tok.digest(make("bpe:300", train, eval)) == without_eval
    assert tok.digest(make("bpe:300", eval)) != without_eval


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_texts_make_the_same_tokenizer(spec):
    assert tok.digest(make(spec)) == tok.digest(make(spec))


# --- the files of Hugging Face


def test_a_loaded_tokenizer_is_the_one_that_was_saved(saved):
    trained, loaded = saved
    assert tok.digest(loaded) == tok.digest(trained)
    assert loaded.is_fast
    assert loaded.get_vocab() == trained.get_vocab()
    assert loaded.model_max_length == 32
    assert loaded.eos_token_id == trained.eos_token_id
    assert loaded.bos_token == loaded.eos_token == loaded.unk_token == "<|endoftext|>"


def test_a_loaded_tokenizer_adds_no_special_token_to_a_text(saved):
    saved.loaded.backend_tokenizer.encode_special_tokens = False
    ids = saved.loaded("some words")["input_ids"]
    assert saved.loaded.decode(ids) == "some words"
    assert saved.loaded.eos_token_id not in ids


def test_outside_of_rows_the_text_of_a_special_token_is_the_token(saved):
    loaded = saved.loaded
    loaded.backend_tokenizer.encode_special_tokens = False
    words = loaded("some words")["input_ids"]
    ids = loaded("some words<|endoftext|>")["input_ids"]
    assert ids == [*words, loaded.eos_token_id]
    assert loaded.decode(ids, skip_special_tokens=True) == "some words"


# --- --tokenizer


@pytest.mark.parametrize(
    "size", ["", "0", "1", "256", "-300", "many", "300.0", "3e2", " ", "4096x", "0x200"]
)
def test_a_size_that_bpe_cannot_have_is_an_error_with_the_smallest(size):
    with pytest.raises(UserError, match=r"--tokenizer bpe:.*257"):
        tok.vocabulary_size(f"bpe:{size}")


def test_bpe_needs_a_size():
    assert tok.vocabulary_size("bpe:257") == 257
    with pytest.raises(UserError, match="write bpe:N"):
        tok.vocabulary_size("bpe")


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_char_and_byte_take_no_size(kind):
    assert tok.vocabulary_size(kind) == 0
    with pytest.raises(UserError, match=f"{kind} takes no size"):
        tok.vocabulary_size(f"{kind}:300")


def test_a_folder_called_like_a_kind_is_loaded_instead_of_trained(tmp_path, monkeypatch):
    assert tok.is_trained("char")
    assert tok.is_trained("bpe:300")
    assert not tok.is_trained("someone/char")

    (tmp_path / "char").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not tok.is_trained("char")


@pytest.mark.parametrize("name", ["nobody/of-this-name", "no-such-tokenizer", "bpe-4096", "empty"])
def test_a_name_without_a_tokenizer_is_an_error_of_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        tok.load_tokenizer(name)
    message = str(error.value)
    assert message.startswith(f"{name}: no tokenizer can be loaded (")
    assert "name one with --tokenizer" in message
    assert "\n" not in message


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_a_tokenizer_has_none(tmp_path, family):
    """transformers makes one for GPT-2 whose only token is end-of-text."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer"):
        tok.load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_of_text_token_is_an_error(tmp_path):
    model = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    without_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    without_eos.save_pretrained(tmp_path / "without-eos")
    with pytest.raises(UserError, match="no end-of-text token"):
        tok.load_tokenizer(str(tmp_path / "without-eos"))
