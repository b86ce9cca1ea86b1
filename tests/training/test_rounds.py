"""The flags of rounds, and the rows that they need."""

import json
from pathlib import Path

import pytest

from llmtrain import parse
from llmtrain.errors import UserError
from llmtrain.training.layout import fit_to_rows
from recipes.distill import DEFAULTS, tokenized
from tests.models.small_models import byte_tokenizer, tiny_llama


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Flags of a run in two rounds, of three steps each."""
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    tiny_llama().save_pretrained(tmp_path / "teacher")
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    lines = [json.dumps({"messages": messages})] * 3
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "book.txt").write_text("To be, or not to be: that is the question. " * 20)
    flags = "--eval_fraction 0 --max_length 32 --global_batch_size 8"
    rounds = "--rounds 2 --prompts_per_round 20 --dataset"
    teacher = str(tmp_path / "teacher")
    names = ["--teacher_model_name_or_path", teacher, "--tokenizer", teacher]
    return [*names, *flags.split(), *rounds.split(), str(tmp_path / "chats.jsonl")]


def test_rounds_say_how_long_a_run_is_and_a_row_has_one_prompt(arguments: list[str]) -> None:
    settings = parse(DEFAULTS, arguments)
    rows = tokenized(settings)
    fit_to_rows(settings, rows)
    assert settings.optim.max_steps == 6
    assert not rows.is_packed

    settings = parse(DEFAULTS, [*arguments, "--max_steps", "4"])
    fit_to_rows(settings, rows)
    assert settings.optim.max_steps == 4


@pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "1+1?"}]])
def test_records_with_a_prompt_alone_are_answered_like_conversations(
    prompt: object, arguments: list[str], tmp_path: Path
) -> None:
    arguments = ["--chat_template", "chatml", *arguments]
    expected = tokenized(parse(DEFAULTS, arguments)).train[0]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": 2}))
    row = tokenized(parse(DEFAULTS, [*arguments[:-1], str(path)])).train[0]
    is_prompt = [label == -100 for label in expected["labels"]]
    length = is_prompt.index(False)
    assert row["input_ids"][:length] == expected["input_ids"][:length]
    assert [label == -100 for label in row["labels"]] == is_prompt

    with pytest.raises(UserError, match="has prompts without answers to evaluate on"):
        tokenized(parse(DEFAULTS, [*arguments[:-1], str(path), "--eval_fraction", "0.5"]))
    with pytest.raises(UserError, match="no field 'text'; the record has prompt, answer"):
        # without --chat_template and --rounds
        tokenized(parse(DEFAULTS, [*arguments[2:-6], "--dataset", str(path)]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_train_epochs 1", "--num_train_epochs has no effect with --rounds"),
        ("--max_tokens 5", "--max_tokens has no effect with --rounds"),
        ("--packing", "--packing has no effect with --rounds"),
        ("{folder}/book.txt", "--rounds needs prompts to answer, and not all"),
    ],
)
def test_what_does_not_go_with_rounds_is_one_line(
    flags: str, message: str, arguments: list[str], tmp_path: Path
) -> None:
    settings = parse(DEFAULTS, [*arguments, *flags.format(folder=tmp_path).split()])
    with pytest.raises(UserError, match=message):
        fit_to_rows(settings, tokenized(settings))
