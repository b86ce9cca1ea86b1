"""Prompts and completions of plain text are trained without a chat template, followed by EOS."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from llmtrain.data.config import ChatConfig, PairConfig, RowConfig
from llmtrain.data.formats import conversation_of, preference_of
from llmtrain.data.render import PromptCompletionRenderer, TokenSequence
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.summary import eval_prompt
from tests.data.chat_records import tokenize_rows
from tests.data.chats import ASSISTANT, TEMPLATES, TOOL, USER, chat, make, unmarked
from tests.data.preparation import left_behind, log_lines, write_records

pytestmark = pytest.mark.usefixtures("cache")

CHATML = unmarked(TEMPLATES["chatml"])
Capture = pytest.CaptureFixture[str]


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Let a tokenizer put BOS before every text."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


# --- rendering


def sequence_of(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str) -> TokenSequence:
    record = {"prompt": prompt, "completion": completion}
    conversation = conversation_of(record, "prompt_completion")
    (sequence,) = PromptCompletionRenderer(tokenizer)(conversation).sequences
    return sequence


def target_text(tokenizer: PreTrainedTokenizerFast, sequence: TokenSequence) -> str:
    text: str = tokenizer.decode(sequence.ids[sequence.loss_mask])
    return text


@pytest.mark.parametrize("has_bos", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("spec", ["byte", "bpe:320"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        pytest.param("2 + 3 =", " 5", id="sum"),
        pytest.param("Question: ", "question?", id="space-at-the-border"),
        pytest.param("", "the answer", id="empty-prompt"),
        pytest.param("漢字", " 🙂e\u0301\n", id="unicode"),
    ],
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
    bos = "<s>" if has_bos else ""
    assert tokenizer.decode(sequence.ids) == bos + prompt + completion + "</s>"
    assert sequence.ids.dtype == np.int32

    # The first token of a row is never a target, because nothing predicts it.
    expected_mask = np.arange(len(sequence.ids)) >= max(len(prompt_ids), 1)
    np.testing.assert_array_equal(sequence.loss_mask, expected_mask)
    assert sequence.loss_mask.dtype == np.bool_
    assert sequence.end.target_bytes == len(completion.encode())
    assert (len(sequence.turn_ends), sequence.end.ended) == (1, 1)


def test_no_token_belongs_to_both_the_prompt_and_the_completion() -> None:
    tokenizer = make(spec="bpe:320")
    assert tokenizer.tokenize(": question?") == [":", "Ġquestion", "?"]

    sequence = sequence_of(tokenizer, "Ask: ", "question?")

    assert target_text(tokenizer, sequence) == "question?</s>"


def test_special_tokens_are_text_except_for_eos_at_the_end() -> None:
    tokenizer = make()

    sequence = sequence_of(tokenizer, "<s>a</s>", "b<|im_end|> </s></s>")

    assert tokenizer.decode(sequence.ids) == "<s>a</s>b<|im_end|> </s></s>"
    special_ids = [id for id in sequence.ids.tolist() if id in tokenizer.all_special_ids]
    assert special_ids == [tokenizer.eos_token_id]
    assert sequence.end.target_bytes == len("b<|im_end|> </s>")

    with_one_special = sequence_of(tokenizer, "a <s>", " b")
    assert tokenizer.decode(with_one_special.ids) == "a <s> b</s>"


def test_a_text_answer_that_repeats_its_prompt_is_trained_as_it_is() -> None:
    """As TRL does it. An answer that echoes its question may be the rejected one."""
    record = preference_of({"prompt": "the dog", "chosen": " is A", "rejected": "the dog is A"})

    assert [answer[0]["content"] for answer in record.answers] == [" is A", "the dog is A"]


# --- from files to rows

COMPLETIONS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(9)]
PREFERENCES = [
    {"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": f" {i + 2}"} for i in range(9)
]
CONVERSATIONS = [{"messages": chat(f"{i}?", "so").messages} for i in range(9)]
# The last record is not plain text.
MIXED = [*COMPLETIONS[:3], {"prompt": [USER], "completion": [ASSISTANT]}]


def tokenize_records(
    folder: Path,
    records: list[dict[str, Any]],
    template: str | None = None,
    config_type: type[RowConfig] = ChatConfig,
    **settings: Any,
) -> Tokenized:
    """Tokenize records with a tokenizer that has a template, or none."""
    with_bos(make(template)).save_pretrained(folder / "tokenizer")
    return tokenize_rows(
        config_type,
        write_records(folder / "records.jsonl", records),
        max_length=63,
        **{"tokenizer": str(folder / "tokenizer"), "eval_fraction": 0.3, **settings},
    )


def texts_of(tokenized: Tokenized) -> list[str]:
    """Return the prompts with their completions in all rows, without BOS and EOS."""
    texts = []
    for rows in (tokenized.train, tokenized.eval):
        for row in rows or []:
            sequences = tokenized.tokenizer.decode(row["input_ids"]).split("<s>")
            # No EOS is in the text before the first BOS, and in the padding.
            texts += [text.partition("</s>")[0] for text in sequences if "</s>" in text]
    return texts


@pytest.mark.parametrize(
    ("records", "config_type"), [(COMPLETIONS, ChatConfig), (PREFERENCES, PairConfig)]
)
@pytest.mark.parametrize(
    ("template", "chat_template"),
    [
        pytest.param(None, None, id="tokenizer-without-template"),
        pytest.param(CHATML, "none", id="flag-removes-template"),
    ],
)
def test_rows_of_plain_text_are_prompts_completions_and_eos(
    tmp_path: Path,
    capsys: Capture,
    records: list[dict[str, Any]],
    config_type: type[RowConfig],
    template: str | None,
    chat_template: str | None,
) -> None:
    settings = {"chat_template": chat_template}
    if config_type is PairConfig:
        settings["share_prompts"] = False
    tokenized = tokenize_records(tmp_path, records, template, config_type, **settings)

    answers = [name for name in records[0] if name != "prompt"]
    texts = [record["prompt"] + record[name] for record in records for name in answers]
    assert sorted(texts_of(tokenized)) == sorted(texts)
    eos = tokenized.tokenizer.eos_token_id
    labels = tokenized.train.column("labels")
    train_records = tokenized.metadata.records - tokenized.metadata.eval_records
    assert (labels == eos).sum() == train_records * len(answers)

    assert tokenized.stop_token_ids == (eos,)
    assert tokenized.tokenizer.chat_template is None
    assert tokenized.new_tokens == []
    prompt = tokenized.tokenizer.decode(eval_prompt(tokenized))
    assert prompt.rpartition("<s>")[2] in [record["prompt"] for record in records]


def test_conversations_get_chatml_if_the_tokenizer_has_no_template(
    tmp_path: Path, capsys: Capture
) -> None:
    by_default = tokenize_records(tmp_path, MIXED[::-1])
    assert "--chat_template chatml" in log_lines(capsys, "default")[0]
    by_name = tokenize_records(tmp_path, MIXED[::-1], chat_template="chatml")
    assert log_lines(capsys, "default") == []

    assert by_default.metadata.data_sha256 == by_name.metadata.data_sha256
    assert by_default.tokenizer.chat_template == by_name.tokenizer.chat_template


def test_text_beside_completions_needs_no_template(tmp_path: Path) -> None:
    text = write_records(tmp_path / "text.jsonl", [{"text": "some words"}])
    settings = {"eval_dataset": [str(text)], "eval_fraction": 0.0}
    assert tokenize_records(tmp_path, COMPLETIONS, **settings).tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("records", "chat_template", "hint"),
    [
        pytest.param(CONVERSATIONS, "none", "--chat_template chatml", id="conversations"),
        pytest.param(MIXED, None, "line 4: .* --chat_template chatml", id="one-among-plain-text"),
        pytest.param(
            [COMPLETIONS[0], COMPLETIONS[1] | {"tools": [TOOL]}],
            "none",
            "line 2: .* --chat_template chatml",
            id="tools",
        ),
        pytest.param(
            [COMPLETIONS[0], {"prompt": "a", "completion": "\ud83d"}],
            None,
            "line 2: .*surrogate",
            id="half-of-a-surrogate-pair",
        ),
    ],
)
def test_records_that_are_not_plain_text_are_refused_without_a_template(
    tmp_path: Path,
    cache: Path,
    records: list[dict[str, Any]],
    chat_template: str | None,
    hint: str,
) -> None:
    with pytest.raises(UserError, match=hint) as refused:
        tokenize_records(tmp_path, records, chat_template=chat_template)

    assert "\n" not in str(refused.value)
    assert left_behind(cache) == []
