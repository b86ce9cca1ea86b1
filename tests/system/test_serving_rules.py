"""Other tools read finished models, merged ones and adapters as they are meant.

The rules of vLLM 0.33 and SGLang 0.5.23 are applied here. Neither is installed beside this package: they need other versions of torch and transformers. The
rules are those of their source files, which the comments name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Lfm2Config, pipeline
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from llmtrain.cli import main
from llmtrain.data.prompts import Prompts
from llmtrain.models.generation import Sampling, TextModel
from tests.forked import run_forked
from tests.launching import FINETUNE, GPT, PYTHON, SMALL_LLAMA, TINY, read_json, write_chats

# The architectures that llmtrain trains, and that a server knows, with the version and the file.
SERVED = read_json(Path(__file__).with_name("served_architectures.json"))
# The generation settings that a server takes as its defaults.
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
# vLLM: --max-lora-rank, vllm/config/lora.py
MAX_LORA_RANK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[str, Path]:
    """Folders of finished models by name."""
    folder = tmp_path_factory.mktemp("served")
    chats = write_chats(folder / "chats.jsonl")

    def train(name: str, recipe: str, dataset: Path, *flags: str) -> Path:
        command = [*PYTHON, recipe, *flags, "--dataset", str(dataset), "--report_to", "none"]
        steps = ["--max_steps", "3", "--output_dir", str(folder / name)]
        run_forked([*command, *steps]).assert_ok()
        return folder / name / "model"

    of_64 = ["--block_size", "64"]
    built = {
        name: train(name, GPT, text_file, *TINY, *of_64, "--architecture", name)
        for name in ("gpt2", "lfm2")
    }
    built["llama"] = train("llama", FINETUNE, chats, *SMALL_LLAMA, *of_64)

    # Published checkpoints come with settings for sampling.
    settings = read_json(built["llama"] / "generation_config.json")
    settings |= {"do_sample": True, **SAMPLING}
    (built["llama"] / "generation_config.json").write_text(json.dumps(settings))
    lora = ["--lora_r", "4", *of_64]
    start = ["--model_name_or_path", str(built["llama"])]
    built["adapter"] = train("adapter", FINETUNE, chats, *start, *lora)
    main(["export", str(folder / "adapter"), "--merge", "--to", str(folder / "merged")])
    built["merged"] = folder / "merged"

    # gpt2 has no tokens for chats, so this adapter brings rows of the embedding.
    start = ["--model_name_or_path", str(built["gpt2"])]
    built["adapter with new tokens"] = train("new", FINETUNE, chats, *start, *lora)
    return built


@pytest.mark.parametrize("name", ["gpt2", "lfm2", "llama", "merged"])
def test_servers_read_the_folder_as_the_run_has_left_it(
    name: str, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")

    (architecture,) = config.architectures
    for server in SERVED.values():
        assert architecture in server["architectures"]

    # vLLM: sampling_params.py, update_from_generation_config, and the tokenizer's own token.
    # SGLang: srt/configs/model_config.py, _get_hf_eos_token_id.
    ends = {"<|endoftext|>"}
    if name in ("llama", "merged"):
        ends.add("<|im_end|>")
    expected = {tokenizer.convert_tokens_to_ids(token) for token in ends}
    assert TextModel(str(folder)).stop_token_ids == expected
    stops = token_ids(generation.get("eos_token_id"))
    assert stops | {tokenizer.eos_token_id} == expected
    assert stops | token_ids(config.eos_token_id) == expected

    # vLLM: config/model.py, get_diff_sampling_param; SGLang: get_default_sampling_params.
    sampling = {key: generation[key] for key in [*SAMPLING, "min_p"] if key in generation}
    assert sampling == (SAMPLING if name in ("llama", "merged") else {})

    # vLLM: tokenizers/hf.py; SGLang: srt/utils/hf_transformers/tokenizer.py.
    assert isinstance(tokenizer, TokenizersBackend)
    assert (folder / "tokenizer.json").exists()
    assert len(tokenizer) <= config.vocab_size

    # vLLM: renderers/hf.py, resolve_chat_template; SGLang: srt/entrypoints/openai/serving_chat.py.
    # The first encodes the text without special tokens, the second lets the tokenizer do both.
    assert (tokenizer.chat_template is not None) == (name in ("llama", "merged"))
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "ab"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids

    # vLLM: config/model.py, _get_and_verify_max_len: the smaller of both.
    assert config.max_position_embeddings == 64
    assert tokenizer.model_max_length >= 64

    # `dtype: auto`: vLLM: config/model.py, _resolve_auto_dtype; SGLang: _get_and_verify_dtype.
    # Weights: vLLM: model_executor/model_loader/default_loader.py, the files of the index only.
    tensors = tensors_of(folder)
    assert {dtype for _, dtype in tensors.values()} == {str(config.dtype).removeprefix("torch.")}
    assert tensors.keys() == stock_names(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert read_json(index)["weight_map"] == {key: file for key, (file, _) in tensors.items()}
    else:
        assert {file for file, _ in tensors.values()} == {"model.safetensors"}


def token_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def tensors_of(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the file and the dtype of each tensor of a folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                assert key not in tensors
                dtype = str(file.get_tensor(key).dtype).removeprefix("torch.")
                tensors[key] = (path.name, dtype)
    return tensors


def stock_names(folder: Path) -> set[str]:
    """Return the names of the parameters of transformers' own class, a tied one once."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name for name, _ in model.named_parameters()}


def test_vllm_refuses_an_lfm2_of_recipes_gpt_which_it_would_serve_with_a_wrong_head(
    folders: dict[str, Path],
) -> None:
    # vLLM: model_executor/models/lfm2.py ties the head to the embeddings, whatever the config says,
    # and reads block_dim and conv_dim, which only published checkpoints have.
    config = AutoConfig.from_pretrained(folders["lfm2"])
    assert not config.tie_word_embeddings
    assert not hasattr(config, "block_dim")
    published = Lfm2Config(tie_word_embeddings=True, block_dim=32, conv_dim=32).to_dict()
    assert (published["block_dim"], published["conv_dim"]) == (32, 32), "a fine-tune keeps them"


def refusals(adapter: Path) -> list[str]:
    """Return why a server would not load an adapter.

    vLLM: lora/peft_helper.py, _validate_features and validate_legal; lora/utils.py,
    parse_fine_tuned_lora_name. SGLang: srt/lora/lora_manager.py, validate_new_adapter.
    """
    settings = read_json(adapter / "adapter_config.json")
    found = [
        key
        for key in ("modules_to_save", "use_dora", "lora_bias", "alora_invocation_tokens")
        if settings.get(key)
    ]
    found += [key for key in ("layer_replication", "use_bdlora", "use_qalora") if settings.get(key)]
    if isinstance(settings["init_lora_weights"], str):
        found.append("init_lora_weights")
    if settings["bias"] != "none":
        found.append("bias")
    if max([settings["r"], *settings["rank_pattern"].values()]) > MAX_LORA_RANK:
        found.append("r")
    if isinstance(settings["target_modules"], str) and settings["target_modules"] != "all-linear":
        found.append("target_modules")  # SGLang: srt/lora/utils.py, get_normalized_target_modules
    if (adapter / "added_tokens.json").exists():
        found.append("added_tokens.json")
    matrices = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
    found += [key for key in tensors_of(adapter) if not key.endswith(matrices)]
    return found


def test_an_adapter_is_served_beside_its_base_unless_it_brings_tokens(
    folders: dict[str, Path],
) -> None:
    assert refusals(folders["adapter"]) == []
    # A server takes the stop tokens of the base.
    (base,) = {read_json(folders["adapter"] / "adapter_config.json")["base_model_name_or_path"]}
    stops = [
        read_json(Path(each) / "generation_config.json") for each in (base, folders["adapter"])
    ]
    assert stops[0]["eos_token_id"] == stops[1]["eos_token_id"]

    rows = "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta"
    assert refusals(folders["adapter with new tokens"]) == [rows]


def test_a_pipeline_writes_what_generate_writes(folders: dict[str, Path]) -> None:
    chat = [{"role": "user", "content": "ab"}]
    pipe = pipeline("text-generation", model=str(folders["merged"]))
    (result,) = pipe(
        chat, max_new_tokens=12, do_sample=False, repetition_penalty=1.0, return_tensors=True
    )
    ours = TextModel(str(folders["merged"]))
    prompt = Prompts(ours.tokenizer).of_messages(chat)
    ids = result["generated_token_ids"]
    assert ids[: len(prompt)] == prompt
    text = pipe.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    # The model has learnt little, so its bytes need not make a whole character.
    expected = "".join(ours.stream(prompt, Sampling(max_new_tokens=12, temperature=0)))
    assert text.rstrip("\N{REPLACEMENT CHARACTER}") == expected


@pytest.mark.parametrize("name", ["lfm2", "merged", "adapter"])
def test_lm_eval_loads_a_folder_itself_and_scores_with_our_logits(
    name: str, folders: dict[str, Path]
) -> None:
    """The arguments are those of docs/guides/export.md."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    folder = str(folders[name])
    arguments: dict[str, Any] = {"pretrained": folder}
    if name == "adapter":
        base = read_json(folders[name] / "adapter_config.json")["base_model_name_or_path"]
        arguments = {"pretrained": base, "peft": folder, "tokenizer": folder}
    if name == "lfm2":
        arguments["add_bos_token"] = True

    loaded = huggingface.HFLM(**arguments, device="cpu")
    ours = TextModel(folder)
    if name == "lfm2":
        # In the rows of recipes/gpt.py, end-of-text begins each document.
        question = "ab"
        expected = [ours.tokenizer.eos_token_id, *ours.tokenizer.encode("ab")]
    else:
        question = loaded.apply_chat_template([{"role": "user", "content": "ab"}])
        expected = Prompts(ours.tokenizer).of_question("ab")
    assert loaded.tok_encode(question) == expected

    ids = torch.tensor([expected])
    with torch.no_grad():
        torch.testing.assert_close(loaded._model_call(ids), ours.model(ids).logits)
    assert loaded.max_length == ours.context
