import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.cli import main
from llmtrain.data.chat_template import set_template
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.model_folders import model_folder
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.models.gpt import GPT
from llmtrain.record.saver import write_model
from tests.models.small_models import perturbed

CONTEXT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), CONTEXT)
    model = perturbed(
        GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=CONTEXT), len(words))
    )
    path = tmp_path_factory.mktemp("model")
    write_model(path, model.files(words, "text"), model.state_dict())
    return path


def tokens_by_hand(model: TextModel, prompt: str, count: int) -> list[int]:
    """Greedy decoding without a cache, over the same sliding window."""
    ids = model.tokenizer(prompt)["input_ids"]
    made: list[int] = []
    while len(made) < count:
        if len(ids) >= CONTEXT:
            ids = ids[-(CONTEXT // 2) :]
        with torch.no_grad():
            token = int(model.model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == model.tokenizer.eos_token_id:
            break
        ids, made = [*ids, token], [*made, token]
    return made


def test_the_cache_changes_nothing_even_past_the_context(folder: Path) -> None:
    model = TextModel(str(folder))
    expected = model.tokenizer.decode(tokens_by_hand(model, "Hello", 60))
    text = "".join(model.stream("Hello", Sampling(max_new_tokens=60, temperature=0)))
    assert len(text) > 10
    assert (
        text.rstrip("\N{REPLACEMENT CHARACTER}")
        == expected.rstrip("\N{REPLACEMENT CHARACTER}")[: len(text)]
    )


def test_the_same_seed_writes_the_same_text(folder: Path) -> None:
    model = TextModel(str(folder))
    first, again, other = (
        "".join(model.stream("a", Sampling(40, 1.0, 0, seed))) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_an_empty_prompt_begins_a_text_and_a_long_one_is_cut_to_the_context(folder: Path) -> None:
    model = TextModel(str(folder))
    assert list(model.stream("", Sampling(max_new_tokens=5)))
    assert list(model.stream("x" * 100, Sampling(max_new_tokens=5)))


def test_top_k_one_is_greedy(folder: Path) -> None:
    model = TextModel(str(folder))
    greedy = "".join(model.stream("Hello", Sampling(20, temperature=0)))
    assert "".join(model.stream("Hello", Sampling(20, temperature=1.0, top_k=1, seed=5))) == greedy


def test_a_run_folder_offers_its_finished_model_else_its_newest_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no model yet"):
        model_folder(str(tmp_path))
    for place in ("checkpoints/step-00000002/model", "checkpoints/step-00000010/model", "model"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
        assert model_folder(str(tmp_path)) == str(tmp_path / place)


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"top_k": -1}, {"max_new_tokens": -1}])
def test_settings_out_of_range_are_one_line(settings: dict) -> None:
    with pytest.raises(UserError, match="at least 0"):
        Sampling(**settings)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model") as error:
        TextModel(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, which ends an answer at its end of turn."""
    words = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    set_template(words, "chatml")
    model = perturbed(GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=64), len(words)))
    path = tmp_path_factory.mktemp("chatting")
    files = ModelFiles(
        model.hf_config(words.eos_token_id), words, generation={"eos_token_id": [0, 258]}
    )
    write_model(path, files, model.state_dict())
    return path


@pytest.fixture(scope="module")
def chatting(chat_folder: Path) -> TextModel:
    return TextModel(str(chat_folder))


def turns(count: int) -> list[dict[str, str]]:
    return [
        {"role": role, "content": f"{i}"} for i in range(count) for role in ("user", "assistant")
    ][:-1]


def test_an_answer_ends_at_any_of_the_tokens_that_the_folder_names(chatting):
    assert chatting.stop_token_ids == {0, 258}


def test_what_no_longer_fits_is_forgotten_question_and_answer_together(chatting):
    system = [{"role": "system", "content": "s"}]
    assert chatting.fitting_prompt([*system, *turns(1)], 1, answer_tokens=10)[0] == 0
    told = [*system, *turns(9)]
    dropped, ids = chatting.fitting_prompt(told, 1, answer_tokens=10)
    assert dropped > 0
    assert dropped % 2 == 0
    assert len(ids) + 10 <= 64
    text = chatting.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\ns<|im_end|>")
    assert text.endswith("<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n")
    assert f"user\n{dropped // 2}<|im_end|>" in text
    assert f"user\n{dropped // 2 - 1}<|im_end|>" not in text


@pytest.mark.parametrize("prompt", ["conversation", "text"])
def test_cutting_a_long_prompt_prints_no_warning_of_transformers(chatting, caplog, prompt):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate
    chatting.tokenizer.deprecation_warnings.clear()  # transformers warns once per tokenizer
    try:
        with caplog.at_level("WARNING", logger="transformers"):
            if prompt == "conversation":
                dropped, _ = chatting.fitting_prompt(turns(30), 0, answer_tokens=10)
                assert dropped > 0
            else:
                list(chatting.stream("x" * 90, Sampling(max_new_tokens=1)))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_question_too_long_by_itself_is_kept(chatting):
    dropped, ids = chatting.fitting_prompt(
        [*turns(2)[:2], {"role": "user", "content": "x" * 90}], 0, answer_tokens=10
    )
    assert dropped == 2
    assert len(ids) > 90


def test_a_model_without_a_chat_template_says_what_it_can_do(folder, chatting):
    chatting.check_chats()
    with pytest.raises(UserError, match="use llmtrain generate"):
        TextModel(str(folder)).check_chats()


@pytest.fixture
def output_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """What a command prints, given its input."""

    def output(words: list[str], text: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        main([*words, "--max_new_tokens", "6", "--temperature", "0"])
        return capsys.readouterr().out

    return output


PROMPTS = [
    {"id": 7, "prompt": "Hello"},
    {"prompt": "two\nlines"},
    {"prompt": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}], "n": 1},
]


def expected_text(model: TextModel, record: dict[str, Any]) -> str:
    prompt = record.get("prompt") or record["messages"]
    ids = prompt if isinstance(prompt, str) else model.chat_prompt(prompt)
    return "".join(model.stream(ids, Sampling(max_new_tokens=6, temperature=0)))


@pytest.mark.parametrize("source", ["file", "input"])
def test_each_line_of_a_file_or_of_the_input_is_a_prompt(
    source: str, chat_folder: Path, chatting: TextModel, output_of, tmp_path: Path
) -> None:
    lines = "\n".join(json.dumps(record) for record in PROMPTS)
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{lines}\n\n")
    words = ["generate", str(chat_folder), "--json"]
    if source == "file":
        printed = output_of([*words, "--prompt_file", str(path)], "")
    else:
        printed = output_of(words, path.read_text())
    results = [json.loads(line) for line in printed.splitlines()]
    expected = [{**record, "text": expected_text(chatting, record)} for record in PROMPTS]
    assert results == expected


def test_lines_of_text_are_prompts_and_an_empty_input_begins_a_text(
    folder: Path, output_of, tmp_path: Path
) -> None:
    words = ["generate", str(folder)]
    first = output_of([*words, "--prompt", "Hello"], "not read")
    second = output_of([*words, "--prompt", "a {b}"], "")
    assert output_of(words, "Hello\n\na {b}\n") == f"{first}\n{second}"
    (tmp_path / "prompts.txt").write_text("Hello\r\na {b}")
    assert (
        output_of([*words, "--prompt_file", str(tmp_path / "prompts.txt")], "")
        == f"{first}\n{second}"
    )
    assert output_of(words, "") == output_of([*words, "--prompt", ""], "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts."),
        ("Hello\n", 'line 1 is not a JSON object with a "prompt"'),
        ('{"text": "a"}', 'line 1 is not a JSON object with a "prompt"'),
        ('{"prompt": 3}', "line 1: a prompt is a text or a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1 ends with an answer"),
    ],
)
def test_a_file_without_prompts_is_refused_before_a_model_is_loaded(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(SystemExit):
        main(["generate", "no/model", "--prompt_file", str(tmp_path / "prompts.jsonl")])
    assert says in capsys.readouterr().err


def test_an_input_that_is_no_text_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(SystemExit):
        main(["generate", str(folder)])
    assert capsys.readouterr().err == "error: the input is not UTF-8 text.\n"


def test_a_message_may_have_blank_lines_and_an_empty_line_is_none(
    chat_folder: Path, chatting: TextModel, output_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = TextModel.fitting_prompt

    def recording(model: TextModel, messages: list[dict[str, str]], **options: Any) -> Any:
        asked.append(messages[-1]["content"])
        return original(model, messages, **options)

    monkeypatch.setattr(TextModel, "fitting_prompt", recording)
    text = 'a\n\n"""\nb\n\nc\n"""\n"""d"""\n"""e\nf"""\n'
    printed = output_of(["chat", str(chat_folder), "--json"], text)
    assert asked == ["a", "b\n\nc", "d", "e\nf"]
    assert len(printed.splitlines()) == 4
