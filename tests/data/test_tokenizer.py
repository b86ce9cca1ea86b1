"""The tokenizers made here give back every text exactly, now and after a trip through Hugging Face's files."""

import pytest
import tokenizers
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
    spec: str, train: list[str] = TEXTS, everything: list[str] | None = None
) -> PreTrainedTokenizerFast:
    trained = tok.train_tokenizer(
        spec, iter(train), lambda: iter(everything if everything is not None else train)
    )
    return tok.as_pretrained(trained, block_size=32)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """As the rows are encoded: nothing in a text is special."""
    tokenizer.backend_tokenizer.encode_special_tokens = True
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=SPECS)
def pair(request, tmp_path_factory) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """A tokenizer, and itself after it was saved and loaded."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make(request.param)
    made.save_pretrained(folder)
    return made, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_exactly_also_after_save_and_load(pair, text):
    made, loaded = pair
    ids = encode(made, text)
    assert made.decode(ids) == loaded.decode(ids) == text
    assert encode(loaded, text) == ids


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_contains_the_token_that_ends_texts(pair, text):
    made, _ = pair
    assert made.eos_token_id not in encode(made, text)
    assert all(0 <= token < len(made) for token in encode(made, text))


def test_a_loaded_tokenizer_is_the_one_that_was_saved(pair):
    made, loaded = pair
    assert tok.digest(made) == tok.digest(loaded)
    assert loaded.is_fast
    assert loaded.get_vocab() == made.get_vocab()
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == (tok.END_OF_TEXT,) * 3
    assert (loaded.eos_token_id, loaded.model_max_length) == (made.eos_token_id, 32)


def test_a_loaded_tokenizer_adds_nothing_and_ends_texts_where_it_is_asked_to(pair):
    _, loaded = pair
    loaded.backend_tokenizer.encode_special_tokens = False
    plain = loaded("some words")["input_ids"]
    assert loaded.decode(plain) == "some words"
    assert loaded.eos_token_id not in plain
    assert loaded("some words<|endoftext|>")["input_ids"] == [*plain, loaded.eos_token_id]
    assert loaded.decode([*plain, loaded.eos_token_id], skip_special_tokens=True) == "some words"


@pytest.mark.parametrize("text", TEXTS)
def test_char_makes_a_token_of_every_character_and_byte_of_every_byte(text):
    assert len(encode(make("char"), text)) == len(text)
    assert len(encode(make("byte"), text)) == len(text.encode())


def test_bpe_has_the_size_that_was_asked_for_where_the_text_allows_it():
    words = [f"word{i} other{i * 7}" for i in range(200)]
    assert len(make("bpe:257", words)) == 257
    assert len(make("bpe:320", words)) == 320
    assert len(make("bpe:400", ["ab"])) < 400
    assert len(make("byte", words)) == 257


@pytest.mark.parametrize("spec", ["byte", "bpe:300"])
def test_bytes_that_were_never_seen_are_encoded_too(spec):
    made = make(spec, ["only ascii words here"])
    for text in TEXTS:
        assert made.decode(encode(made, text)) == text


def test_the_alphabet_of_char_covers_held_out_characters():
    made = make("char", ["abc"], everything=["abc", "xyz漢"])
    assert made.decode(encode(made, "cab漢zyx")) == "cab漢zyx"
    assert made.eos_token_id not in encode(made, "xyz漢")
    assert len(made) == 1 + len("abcxyz漢")


def test_bpe_learns_nothing_from_held_out_text():
    alone = make("bpe:300", ["one two three " * 50])
    beside = make(
        "bpe:300", ["one two three " * 50], everything=["one two three " * 50, "zzzz qqqq " * 500]
    )
    assert tok.digest(alone) == tok.digest(beside)
    assert tok.digest(alone) != tok.digest(make("bpe:300", ["zzzz qqqq " * 500]))


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_text_makes_the_same_tokenizer(spec):
    assert tok.digest(make(spec)) == tok.digest(make(spec))


@pytest.mark.parametrize(
    "size", ["", "0", "1", "256", "-300", "many", "300.0", "3e2", " ", "4096x", "0x200"]
)
def test_a_size_that_a_bpe_cannot_have_is_an_error_that_names_the_least(size):
    with pytest.raises(UserError, match=r"--tokenizer bpe:.*257"):
        tok.vocabulary_size(f"bpe:{size}")


def test_bpe_without_a_size_is_an_error_and_char_and_byte_take_none():
    with pytest.raises(UserError, match="write bpe:N"):
        tok.vocabulary_size("bpe")
    for kind in ("char", "byte"):
        tok.vocabulary_size(kind)
        with pytest.raises(UserError, match=f"{kind} takes no size"):
            tok.vocabulary_size(f"{kind}:300")
    assert tok.vocabulary_size("bpe:257") == 257


def test_a_folder_of_the_name_is_loaded_rather_than_trained(tmp_path, monkeypatch):
    assert tok.is_trained("char")
    assert tok.is_trained("bpe:300")
    assert not tok.is_trained("someone/char")
    (tmp_path / "char").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not tok.is_trained("char")


@pytest.mark.parametrize("name", ["nobody/of-this-name", "no-such-tokenizer", "bpe-4096", "empty"])
def test_a_tokenizer_that_is_not_there_is_an_error_of_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        tok.load_tokenizer(name)
    assert str(caught.value).startswith(f"{name}: no tokenizer can be loaded (")
    assert "name one with --tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_end_a_text_is_an_error_of_one_line(tmp_path):
    bare = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="no end-of-text token"):
        tok.load_tokenizer(str(tmp_path / "bare"))
