"""Prompts and completions of plain text train without a chat template, followed by EOS."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig
from llmtrain.data.formats import Conversation, conversation_of, preference_of
from llmtrain.data.loader import IGNORED
from llmtrain.data.messages import BadRecord
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.prompt_completion import PromptCompletionRenderer
from llmtrain.data.render import Renderer, make_renderer
from llmtrain.data.rendered import TokenSequence, cut
from tests.data.chats import ASSISTANT, TEMPLATES, TOOL, USER, chat, make, unmarked
from tests.data.test_prepare import complaint, left_behind


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pair(prompt: str, completion: str) -> Conversation:
    record = {"prompt": prompt, "completion": completion}
    conversation = conversation_of(record, "prompt_completion")
    assert conversation.is_plain_text
    return conversation


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def sequence_of(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str) -> TokenSequence:
    (sequence,) = PromptCompletionRenderer(tokenizer)(pair(prompt, completion)).sequences
    return sequence


@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("spec", ["byte", "bpe:320"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("2 + 3 =", " 5"), ("Question: ", "question?"), ("", "the answer"), ("漢字", " 🙂e\u0301\n")],
)
def test_a_sequence_is_the_prompt_the_completion_and_eos(
    spec: str, has_bos: bool, prompt: str, completion: str
) -> None:
    tokenizer = make(spec=spec)
    if has_bos:
        tokenizer = with_bos(tokenizer)
    sequence = sequence_of(tokenizer, prompt, completion)
    prompt_ids = tokenizer.encode(prompt)
    assert sequence.ids[: len(prompt_ids)].tolist() == prompt_ids
    assert tokenizer.decode(sequence.ids) == "<s>" * has_bos + prompt + completion + "</s>"
    assert (sequence.ids == tokenizer.bos_token_id).sum() == has_bos

    loss_mask = np.arange(len(sequence.ids)) >= max(len(prompt_ids), 1)
    np.testing.assert_array_equal(sequence.loss_mask, loss_mask)
    assert (sequence.ids.dtype, sequence.loss_mask.dtype) == (np.int32, np.bool_)
    assert sequence.target_bytes == len(completion.encode())
    assert (sequence.turns, sequence.ended) == (1, 1)


def test_no_token_holds_both_the_prompt_and_the_completion() -> None:
    tokenizer = make(spec="bpe:320")
    assert tokenizer.tokenize(": question?") == [":", "Ġquestion", "?"]
    sequence = sequence_of(tokenizer, "Ask: ", "question?")
    assert tokenizer.decode(sequence.ids[sequence.loss_mask]) == "question?</s>"


def test_special_tokens_are_text_but_for_an_eos_at_the_end() -> None:
    tokenizer = make()
    rendered = PromptCompletionRenderer(tokenizer)(pair("<s>a</s>", "b<|im_end|> </s></s>"))
    (sequence,) = rendered.sequences
    assert tokenizer.decode(sequence.ids) == "<s>a</s>b<|im_end|> </s></s>"
    assert rendered.counts["special_as_text"] == 4
    specials = set(tokenizer.all_special_ids) & set(sequence.ids.tolist())
    assert specials == {tokenizer.eos_token_id}
    assert sequence.ids.tolist().count(tokenizer.eos_token_id) == 1
    assert sequence.target_bytes == len("b<|im_end|> </s>")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "completion": "b"},
        {"prompt": "a", "completion": "b", "tools": [TOOL]},
        {"prompt": "a", "completion": "\ud83d"},
    ],
)
def test_other_records_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(
        BadRecord, match=r"not plain text .*--chat_template chatml|half of a surrogate"
    ):
        PromptCompletionRenderer(make())(conversation_of(record, "prompt_completion"))


def test_each_answer_of_a_pair_is_a_completion() -> None:
    renderer = PromptCompletionRenderer(with_bos(make()))
    record = preference_of({"prompt": "a <s>", "chosen": " b", "rejected": " c</s>"})
    rendered = renderer(record)
    texts = [renderer.tokenizer.decode(sequence.ids) for sequence in rendered.sequences]
    assert texts == ["<s>a <s> b</s>", "<s>a <s> c</s>"]
    targets = [sequence.ids[sequence.loss_mask] for sequence in rendered.sequences]
    assert [renderer.tokenizer.decode(ids) for ids in targets] == [" b</s>", " c</s>"]
    assert rendered.counts["special_as_text"] == 1  # the last </s> is the EOS of the sequence
    chats = preference_of({"prompt": [USER], "chosen": "b", "rejected": "c"})
    with pytest.raises(BadRecord, match="not plain text"):
        renderer(chats)


def test_a_sequence_can_be_cut() -> None:
    renderer = PromptCompletionRenderer(make())
    sequence = cut(sequence_of(renderer.tokenizer, "abc", "dxyz"), 5, renderer.encoder)
    assert (len(sequence.ids), sequence.target_bytes, sequence.ended) == (5, 2, 0)
    assert cut(sequence_of(renderer.tokenizer, "abc", "d"), 9, renderer.encoder).target_bytes == 1


def test_the_tokenizer_decides_on_the_renderer() -> None:
    assert isinstance(make_renderer(make()), PromptCompletionRenderer)
    assert isinstance(make_renderer(make(unmarked(TEMPLATES["chatml"]))), Renderer)
    renderer = make_renderer(make())
    assert renderer.stop_token_ids == {renderer.tokenizer.eos_token_id}


# --- from files to rows ---

PAIRS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(9)]
PREFERENCES = [
    {"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": f" {i + 2}"} for i in range(9)
]
CONVERSATIONS = [{"messages": chat(f"{i}?", "so").messages} for i in range(9)]


def written(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def saved_tokenizer(folder: Path, template: str | None) -> str:
    tokenizer = with_bos(make(template))
    tokenizer.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def arguments(
    folder: Path,
    records: list[dict[str, Any]],
    template: str | None = None,
    preference: bool = False,
    **flags: Any,
) -> tuple[Any, ...]:
    config = DataConfig(
        dataset=[str(written(folder, records))],
        tokenizer=saved_tokenizer(folder, template),
        eval_fraction=0.3,
    )
    chat_config = PairConfig(**flags) if preference else ChatConfig(**flags)
    return config, 63, chat_config


def texts_of(rows: Tokenized) -> list[str]:
    """The prompts and completions in all rows, which have no padding inside."""
    texts = []
    for split in (rows.train, rows.eval):
        for number in range(len(split or [])):
            row = split[number] if split else {}
            tokens = row["input_ids"]
            texts += rows.tokenizer.decode(tokens).split("<s>")
    return [text.partition("</s>")[0] for text in texts if "</s>" in text]


@pytest.mark.parametrize("preference", [False, True])
@pytest.mark.parametrize(
    ("template", "flag"), [(None, None), (None, "none"), (unmarked(TEMPLATES["chatml"]), "none")]
)
def test_plain_text_trains_without_a_template(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    preference: bool,
    template: str | None,
    flag: str | None,
) -> None:
    records = PREFERENCES if preference else PAIRS
    flags = {"share_prompts": False} if preference else {}
    rows = tokenize(
        *arguments(tmp_path, records, template, preference, chat_template=flag, **flags)
    )
    answers = ("chosen", "rejected") if preference else ("completion",)
    wanted = [record["prompt"] + record[name] for record in records for name in answers]
    assert sorted(texts_of(rows)) == sorted(wanted)
    eos = rows.tokenizer.eos_token_id
    assert rows.stop_token_ids == (eos,)
    assert rows.tokenizer.chat_template is None
    assert rows.new_tokens == []
    labels = [label for row in rows.train.dataset["labels"] for label in row if label != IGNORED]
    assert labels.count(eos) == rows.metadata.audit["kept"] * len(answers)
    prompt = rows.tokenizer.decode(rows.eval_prompt())
    assert prompt.rpartition("<s>")[2] in [record["prompt"] for record in records]
    out = capsys.readouterr().out
    assert "template  none: the rows are prompt, completion and EOS, as plain text\n" in out


def test_another_template_makes_other_rows_of_plain_text(tmp_path: Path) -> None:
    template = unmarked(TEMPLATES["chatml"])
    hashes = {
        tokenize(*arguments(tmp_path, PAIRS, template, chat_template=flag)).metadata.data_sha256
        for flag in (None, "none", "chatml")
    }
    assert len(hashes) == 3


MIXED = [*PAIRS[:3], {"prompt": [USER], "completion": [ASSISTANT]}]


@pytest.mark.parametrize("records", [CONVERSATIONS, MIXED[::-1]])
def test_conversations_get_chatml_if_the_tokenizer_has_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[dict[str, Any]]
) -> None:
    rows = tokenize(*arguments(tmp_path, records))
    line = "default   --chat_template chatml (the tokenizer has no chat template)\n"
    assert capsys.readouterr().out.count(line) == 1
    named = tokenize(*arguments(tmp_path, records, chat_template="chatml"))
    assert line not in capsys.readouterr().out
    assert rows.metadata.data_sha256 == named.metadata.data_sha256
    assert rows.tokenizer.chat_template == named.tokenizer.chat_template


@pytest.mark.parametrize(
    ("records", "flag", "what"),
    [
        (CONVERSATIONS, "none", "--chat_template none is for prompts.*use --chat_template chatml"),
        (MIXED, None, "line 4: the record is not plain text .* use --chat_template chatml"),
        (MIXED, "none", "line 4: the record is not plain text .* use --chat_template chatml"),
    ],
)
def test_conversations_among_plain_text_need_a_template(
    tmp_path: Path, cache: Path, records: list[dict[str, Any]], flag: str | None, what: str
) -> None:
    message = complaint(*arguments(tmp_path, records, chat_template=flag))
    assert re.search(what, message), message
    assert left_behind(cache) == []


def test_the_data_set_that_needs_a_template_is_named(tmp_path: Path) -> None:
    data, *rest = arguments(tmp_path, PAIRS, chat_template="none")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CONVERSATIONS[0]))
    data.eval_dataset = [str(path)]
    assert "the records of " + str(path) in complaint(data, *rest)
