import logging
from pathlib import Path

import pytest
import torch

from llmtrain.data.chat_template import set_template
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.model_folders import model_folder
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.models.gpt import GPT
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.record.checkpoint import write_model
from tests.models.test_gpt import jolted

CONTEXT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), CONTEXT)
    model = jolted(GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=CONTEXT), len(words)))
    path = tmp_path_factory.mktemp("model")
    write_model(path, model.files(words, "text"), DistributedTensors(model.state_dict()))
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
def chatting(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A model with a chat template, which ends an answer at its end of turn."""
    words = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    set_template(words, "chatml")
    model = jolted(GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=64), len(words)))
    path = tmp_path_factory.mktemp("chatting")
    files = ModelFiles(
        model.hf_config(words.eos_token_id), words, generation={"eos_token_id": [0, 258]}
    )
    write_model(path, files, DistributedTensors(model.state_dict()))
    return TextModel(str(path))


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
