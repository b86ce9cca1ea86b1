"""Generating text: the cache, the context, sampling, conversations, and the commands."""

import io
import json
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from accelerate import Accelerator
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from llmtrain.cli import main
from llmtrain.commands import chat
from llmtrain.commands.chat import fitting_prompt
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.prompts import Prompts
from llmtrain.errors import UserError
from llmtrain.model_folders import model_folder
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import Sampling, TextModel, continuation_text
from llmtrain.models.gpt import GPT
from llmtrain.record.saver import write_model
from llmtrain.training.evaluate import sample
from tests.data.chats import TEMPLATES, make_sentencepiece, unmarked
from tests.engines import engine_of
from tests.models.small_models import byte_tokenizer, perturbed, tiny_llama

CONTEXT = 24
CHAT_CONTEXT = 64
PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model without a chat template."""
    tokenizer = byte_tokenizer(CONTEXT)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=CONTEXT)
    model: Any = perturbed(GPT(config, len(tokenizer)))
    path = tmp_path_factory.mktemp("model")
    write_model(path, model.files(tokenizer, "text"), model.state_dict())
    return path


@pytest.fixture(scope="module")
def text_model(folder: Path) -> TextModel:
    return TextModel(str(folder))


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with a chat template, whose answers end at the end of a turn."""
    tokenizer = byte_tokenizer(CHAT_CONTEXT)
    set_template(tokenizer, "chatml")
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=CHAT_CONTEXT)
    model: Any = perturbed(GPT(config, len(tokenizer)))
    files = ModelFiles(
        model.hf_config(tokenizer.eos_token_id),
        tokenizer,
        generation={"eos_token_id": [0, 258]},
    )
    path = tmp_path_factory.mktemp("chat")
    write_model(path, files, model.state_dict())
    return path


@pytest.fixture(scope="module")
def chat_model(chat_folder: Path) -> TextModel:
    return TextModel(str(chat_folder))


def prompts_of(model: TextModel) -> Prompts:
    return Prompts(model.tokenizer, model.stop_token_ids)


def continuation(model: TextModel, prompt: str, **sampling: Any) -> str:
    return "".join(model.stream(prompts_of(model).of_text(prompt), Sampling(**sampling)))


def numbered_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with 257 tokens, each of which is shown as a number."""
    vocabulary = {tok.END_OF_TEXT: 0} | {f"<{number}>": number for number in range(1, 257)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=tok.END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tok.as_pretrained(tokenizer, CONTEXT)


def chain(vocabulary: int, next_token: dict[int, int], otherwise: int) -> LlamaForCausalLM:
    """Return a Llama whose likeliest next token follows from the last one."""
    width = 2 * -(-vocabulary // 2)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=CHAT_CONTEXT,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # The layer adds nothing to the embeddings, which are one-hot.
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        model.lm_head.weight.zero_()
        for token in range(vocabulary):
            model.lm_head.weight[next_token.get(token, otherwise), token] = 1
    return model.eval()


# --- a continuation


def greedy_tokens_without_cache(model: TextModel, prompt: str, count: int) -> list[int]:
    """Decode over the same sliding window, with a full forward pass for each token."""
    ids = model.tokenizer(prompt)["input_ids"]
    generated: list[int] = []
    while len(generated) < count:
        if len(ids) >= CONTEXT:
            ids = ids[-(CONTEXT // 2) :]
        with torch.no_grad():
            token = int(model.model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == model.tokenizer.eos_token_id:
            break
        ids = [*ids, token]
        generated.append(token)
    return generated


def test_the_cache_changes_nothing_even_beyond_the_context(text_model: TextModel) -> None:
    tokens = greedy_tokens_without_cache(text_model, "Hello", 60)
    expected = text_model.tokenizer.decode(tokens).rstrip(PARTIAL_CHARACTER)

    text = continuation(text_model, "Hello", max_new_tokens=60, temperature=0)

    assert len(tokens) > CONTEXT
    # Bytes at the end that are no whole character are not yielded.
    assert text.rstrip(PARTIAL_CHARACTER) == expected


def test_the_same_seed_generates_the_same_text(text_model: TextModel) -> None:
    options = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 0}
    first = continuation(text_model, "a", seed=1, **options)
    assert continuation(text_model, "a", seed=1, **options) == first
    assert continuation(text_model, "a", seed=2, **options) != first


@pytest.mark.parametrize("prompt", ["", "x" * 100], ids=["empty", "longer than the context"])
def test_a_prompt_may_have_any_length(text_model: TextModel, prompt: str) -> None:
    assert continuation(text_model, prompt, max_new_tokens=5)


def test_the_likeliest_token_alone_is_greedy(text_model: TextModel) -> None:
    greedy = continuation(text_model, "Hello", max_new_tokens=20, temperature=0)
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    assert continuation(text_model, "Hello", top_k=1, **options) == greedy


def test_every_prompt_and_every_turn_has_its_own_random_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = numbered_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama())  # whose probabilities are nearly even
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text_model = TextModel(str(tmp_path))

    def first_tokens(prompts: list[str]) -> list[str]:
        path = tmp_path / "prompts.txt"
        path.write_text("\n".join(prompts))
        flags = "--temperature 1 --top_k 0 --max_new_tokens 1 --json"
        main(["generate", str(tmp_path), "--prompt_file", str(path), *flags.split()])
        return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]

    prompts = [f"<{number}>" for number in range(24)]
    of_transformers = set()
    set_seed(0)
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        tokens = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=1)
        of_transformers.add(int(tokens[0, -1]))
    tokens = first_tokens(prompts)

    assert len(of_transformers) > 18
    assert len(set(tokens)) > 18
    assert len(set(first_tokens(["<7>"] * 24))) > 18
    # An answer does not depend on the prompts before it.
    assert first_tokens(["<40>", "<50> <60>", *prompts[2:]])[2:] == tokens[2:]

    sampling = Sampling(max_new_tokens=1, temperature=1, top_k=0)
    turns = [next(text_model.stream([7], sampling, turn=turn)) for turn in range(24)]
    assert len(set(turns)) > 18


# Their outputs have no key-value cache.
FAMILIES_WITHOUT_CACHE = {
    "mamba": {"hidden_size": 32, "state_size": 8},
    "mamba2": {
        "hidden_size": 32,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "falcon_mamba": {"hidden_size": 32, "state_size": 8},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "context_length": CONTEXT},
    "recurrent_gemma": {
        "hidden_size": 32,
        "lru_width": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "attention_window_size": 64,
    },
    "openai-gpt": {"n_embd": 32, "n_head": 2, "n_positions": CONTEXT},
}


@pytest.mark.parametrize("family", FAMILIES_WITHOUT_CACHE)
def test_models_without_a_cache_generate_what_transformers_does(
    family: str, tmp_path: Path
) -> None:
    tokenizer = numbered_tokenizer()
    fields = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "head_dim": 16}
    fields |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **fields | FAMILIES_WITHOUT_CACHE[family])
    torch.manual_seed(0)
    perturbed(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    text_model = TextModel(str(tmp_path))
    for prompt in ([5, 6, 7], [8]):
        # RecurrentGemma's layers keep the state of an earlier prompt.
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        expected = tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True)
        sampling = Sampling(max_new_tokens=12, temperature=0)
        assert "".join(text_model.stream(prompt, sampling)) == expected
        assert expected


def test_a_prompt_that_ends_with_a_replacement_character_is_not_repeated() -> None:
    tokenizer = byte_tokenizer(CONTEXT)
    prompt = tokenizer.encode("a\N{REPLACEMENT CHARACTER}")
    whole = tokenizer.encode("é")

    assert continuation_text(tokenizer, prompt, tokenizer.encode("b")) == "b"
    # A prompt that ends within a character is continued with that character.
    assert continuation_text(tokenizer, whole[:1], whole[1:]) == "é"


# --- the space before the first word


def llama_decoder() -> decoders.Decoder:
    """Return the decoder of Llama 2 and Mistral 7B."""
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@pytest.mark.parametrize("make_decoder", [llama_decoder, decoders.Metaspace])
def test_the_space_between_prompt_and_continuation_stays(
    make_decoder: Callable[[], decoders.Decoder],
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    tokenizer = make_sentencepiece(unmarked(TEMPLATES["mistral"]))
    tokenizer.backend_tokenizer.decoder = make_decoder()
    tokenizer.save_pretrained(tmp_path)
    word, letter = tokenizer.convert_tokens_to_ids(["▁b", "a"])
    model = chain(len(tokenizer), next_token={word: letter}, otherwise=word)
    model.save_pretrained(tmp_path)

    # What follows the prompt in the text of all tokens.
    def text_of_transformers(prompt: list[int]) -> str:
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)
        text = tokenizer.decode(tokens[0], skip_special_tokens=True)
        return text.removeprefix(tokenizer.decode(prompt, skip_special_tokens=True))

    expected = text_of_transformers(tokenizer.encode("the quick"))
    assert expected == " ba ba"
    question = [{"role": "user", "content": "the quick"}]
    answer = text_of_transformers(tokenizer.apply_chat_template(question, return_dict=False))

    def output_of(command: str, flags: str, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        options = f"{flags} --max_new_tokens 4 --temperature 0"
        capsys.readouterr()
        main([command, str(tmp_path), *shlex.split(options)])
        return capsys.readouterr().out

    assert output_of("generate", "--prompt 'the quick'") == f"the quick{expected}\n"
    assert json.loads(output_of("generate", "--json", "the quick\n"))["text"] == expected
    in_chat = json.loads(output_of("chat", "--json", "the quick\n"))
    assert in_chat["content"] == answer == " ba ba"
    samples = sample(
        engine_of(accelerator, model),
        tokenizer,
        [tokenizer.encode("the quick")],
        Sampling(max_new_tokens=4, temperature=0),
    )
    assert samples == [expected]


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_new_tokens"])
def test_negative_settings_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="at least 0"):
        Sampling(**{name: -1})


# --- the model of a folder


def test_a_run_offers_its_finished_model_or_else_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model yet"):
        model_folder(str(tmp_path))

    for name in ("checkpoints/step-00000002/model", "checkpoints/step-00000010/model", "model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        assert model_folder(str(tmp_path)) == str(tmp_path / name)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model") as error:
        TextModel(str(tmp_path))
    assert "\n" not in str(error.value)


def test_an_answer_ends_at_any_of_the_tokens_that_the_folder_names(chat_model: TextModel) -> None:
    assert chat_model.stop_token_ids == {0, 258}


def test_a_conversation_needs_a_chat_template(text_model: TextModel, chat_model: TextModel) -> None:
    prompts_of(chat_model).chat_renderer()
    with pytest.raises(UserError, match="use llmtrain generate"):
        prompts_of(text_model).chat_renderer()


# --- conversations that do not fit


SYSTEM_MESSAGE = {"role": "system", "content": "s"}


def make_fitting(
    model: TextModel, messages: list[dict[str, str]], kept_messages: int
) -> tuple[list[dict[str, str]], list[int]]:
    """Make a prompt that leaves ten tokens for the answer."""
    return fitting_prompt(prompts_of(model), messages, kept_messages, model.context - 10)


def numbered_questions(count: int) -> list[dict[str, str]]:
    """Return a conversation of questions 0, 1, ... with their answers, without the last answer."""
    messages = []
    for number in range(count):
        messages.append({"role": "user", "content": str(number)})
        messages.append({"role": "assistant", "content": str(number)})
    return messages[:-1]


def test_a_conversation_that_fits_is_whole(chat_model: TextModel) -> None:
    messages = [SYSTEM_MESSAGE, *numbered_questions(1)]
    fitting, _ = make_fitting(chat_model, messages, 1)
    assert fitting == messages


def test_the_oldest_questions_are_dropped_with_their_answers(chat_model: TextModel) -> None:
    messages = [SYSTEM_MESSAGE, *numbered_questions(9)]

    fitting, ids = make_fitting(chat_model, messages, 1)

    dropped = len(messages) - len(fitting)
    assert dropped > 0
    assert dropped % 2 == 0
    assert len(ids) + 10 <= CHAT_CONTEXT
    prompt = chat_model.tokenizer.decode(ids)
    assert prompt.startswith("<|im_start|>system\ns<|im_end|>")
    assert prompt.endswith("<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n")
    oldest_question = dropped // 2
    assert f"user\n{oldest_question}<|im_end|>" in prompt
    assert f"user\n{oldest_question - 1}<|im_end|>" not in prompt


def test_the_last_question_stays_even_if_it_is_too_long(chat_model: TextModel) -> None:
    messages = [*numbered_questions(2)[:2], {"role": "user", "content": "x" * 90}]
    fitting, ids = make_fitting(chat_model, messages, 0)
    assert fitting == messages[2:]
    assert len(ids) > 90


@pytest.fixture
def transformers_warnings(caplog: pytest.LogCaptureFixture, chat_model: TextModel):
    """Record the warnings of transformers, whose logger does not propagate."""
    chat_model.tokenizer.deprecation_warnings.clear()  # transformers warns once per tokenizer
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    with caplog.at_level("WARNING", logger="transformers"):
        yield caplog
    logger.removeHandler(caplog.handler)


def test_cutting_a_long_conversation_warns_of_nothing(
    chat_model: TextModel, transformers_warnings: pytest.LogCaptureFixture
) -> None:
    fitting, _ = make_fitting(chat_model, numbered_questions(30), 0)
    assert len(fitting) < 59
    assert transformers_warnings.text == ""


def test_cutting_a_long_text_warns_of_nothing(
    chat_model: TextModel, transformers_warnings: pytest.LogCaptureFixture
) -> None:
    assert continuation(chat_model, "x" * 90, max_new_tokens=3)
    assert transformers_warnings.text == ""


# --- llmtrain generate and llmtrain chat


@pytest.fixture
def output_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run a command with an input, and return the printed text."""

    def output_of(*arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        main([*arguments, "--max_new_tokens", "6", "--temperature", "0"])
        return capsys.readouterr().out

    return output_of


RECORDS: list[dict[str, Any]] = [
    {"id": 7, "prompt": "Hello"},
    {"prompt": "two\nlines"},
    {"prompt": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}], "n": 1},
]


def expected_result(model: TextModel, record: dict[str, Any]) -> dict[str, Any]:
    prompt = record.get("prompt") or record["messages"]
    prompts = prompts_of(model)
    ids = prompts.of_text(prompt) if isinstance(prompt, str) else prompts.of_messages(prompt)
    text = "".join(model.stream(ids, Sampling(max_new_tokens=6, temperature=0)))
    return {**record, "text": text}


@pytest.mark.parametrize("source", ["file", "input"])
def test_each_line_of_a_file_or_of_the_input_is_a_prompt(
    source: str, chat_folder: Path, chat_model: TextModel, output_of, tmp_path: Path
) -> None:
    lines = "\n".join(json.dumps(record) for record in RECORDS) + "\n\n"
    command = ["generate", str(chat_folder), "--json"]

    if source == "file":
        path = tmp_path / "prompts.jsonl"
        path.write_text(lines)
        output = output_of(*command, "--prompt_file", str(path))
    else:
        output = output_of(*command, stdin=lines)

    results = [json.loads(line) for line in output.splitlines()]
    assert results == [expected_result(chat_model, record) for record in RECORDS]


def test_lines_of_text_are_prompts(folder: Path, output_of, tmp_path: Path) -> None:
    command = ["generate", str(folder)]
    first = output_of(*command, "--prompt", "Hello", stdin="not read")
    second = output_of(*command, "--prompt", "a {b}")

    assert output_of(*command, stdin="Hello\n\na {b}\n") == f"{first}\n{second}"
    (tmp_path / "prompts.txt").write_text("Hello\r\na {b}")
    output = output_of(*command, "--prompt_file", str(tmp_path / "prompts.txt"))
    assert output == f"{first}\n{second}"


def test_an_empty_input_begins_a_text(folder: Path, output_of) -> None:
    command = ["generate", str(folder)]
    assert output_of(*command, stdin="") == output_of(*command, "--prompt", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "holds no prompts.", id="empty"),
        pytest.param("Hello\n", 'line 1 is not a JSON object with "prompt"', id="not JSON"),
        pytest.param('{"text": "a"}', 'line 1 is not a JSON object with "prompt"', id="no prompt"),
        pytest.param('{"prompt": 3}', "line 1: field 'prompt' is 3, not text", id="number"),
        pytest.param(
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "line 1: the prompt ends with an assistant message",
            id="no question",
        ),
    ],
)
def test_a_file_without_prompts_is_refused_before_a_model_is_loaded(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["generate", "no/model", "--prompt_file", str(path)])
    assert message in capsys.readouterr().err


def test_an_input_that_is_not_utf8_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    latin1 = io.BytesIO(b"caf\xe9\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(latin1, encoding="utf-8"))
    with pytest.raises(SystemExit):
        main(["generate", str(folder)])
    assert capsys.readouterr().err == "error: the input is not UTF-8 text.\n"


def test_a_chat_message_may_have_blank_lines_and_an_empty_line_is_no_message(
    chat_folder: Path, output_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = []

    def record_question(
        prompts: Prompts, messages: list[dict[str, str]], **options: Any
    ) -> tuple[list[dict[str, str]], list[int]]:
        questions.append(messages[-1]["content"])
        return fitting_prompt(prompts, messages, **options)

    turns = []
    generator = Sampling.generator

    def record_turn(sampling: Sampling, number: int, turn: int = 0) -> torch.Generator:
        turns.append((number, turn))
        return generator(sampling, number, turn)

    monkeypatch.setattr(chat, "fitting_prompt", record_question)
    monkeypatch.setattr(Sampling, "generator", record_turn)
    text = 'a\n\n"""\nb\n\nc\n"""\n"""d"""\n"""e\nf"""\n'

    output = output_of("chat", str(chat_folder), "--json", stdin=text)

    assert questions == ["a", "b\n\nc", "d", "e\nf"]
    assert turns == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert len(output.splitlines()) == 4
