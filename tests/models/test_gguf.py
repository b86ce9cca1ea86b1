"""GGUF files: their content, and the models that transformers and llama.cpp read from them."""

import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain import cli
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.gguf import write_gguf
from tests.models.tiny_gguf import (
    CHATML,
    CONFIGS,
    OURS,
    PRE_TOKENIZERS,
    PROMPTS,
    splitting,
    tokenizer_of,
    write_folder,
)

gguf = pytest.importorskip("gguf")

NEW_TOKENS = 12
VOCABULARY = 448


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a small model, with its GGUF file, by its name in ``tiny_gguf``."""
    written: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in written:
            path = write_folder(tmp_path_factory.mktemp("model"), name, dtype)
            write_gguf(path, path / "model.gguf", "tiny")
            written[name, dtype] = path
        return written[name, dtype]

    return folder


@pytest.fixture
def copy(folders, tmp_path: Path) -> Callable[..., Path]:
    """Copy a model folder without its GGUF file, with other settings in ``config.json``."""

    def copy(name: str, **settings: object) -> Path:
        folder = shutil.copytree(folders(name), tmp_path / "copy", dirs_exist_ok=True)
        (folder / "model.gguf").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return copy


def gguf_tensors(path: Path) -> dict[str, torch.Tensor]:
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        content = bytearray(tensor.data.tobytes())
        values = torch.frombuffer(content, dtype=dtypes[tensor.tensor_type.name])
        tensors[tensor.name] = values.view(*reversed(tensor.shape.tolist()))
    return tensors


def gguf_metadata(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.values()
    return {field.name: field.contents() for field in fields}


def check_equal(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


# --- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_weight_is_in_the_file_to_the_bit(folders, dtype: torch.dtype) -> None:
    folder = folders("llama, biases, tied", dtype)
    stored = load_file(folder / "model.safetensors")
    tensors = gguf_tensors(folder / "model.gguf")

    assert len(tensors) == len(stored)
    check_equal(tensors["token_embd.weight"], stored["model.embed_tokens.weight"])
    check_equal(tensors["blk.1.ffn_up.weight"], stored["model.layers.1.mlp.up_proj.weight"])
    values = stored["model.layers.1.self_attn.v_proj.weight"]
    check_equal(tensors["blk.1.attn_v.weight"], values)
    norm = stored["model.layers.1.input_layernorm.weight"]
    check_equal(tensors["blk.1.attn_norm.weight"], norm.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_llama_are_reordered_for_the_rotation_of_llama_cpp(
    folders, dtype: torch.dtype
) -> None:
    """llama.cpp rotates row 2 i of a head with row 2 i + 1, transformers row i with row i + 4."""
    folder = folders("llama, biases, tied", dtype)
    stored = load_file(folder / "model.safetensors")
    tensors = gguf_tensors(folder / "model.gguf")

    for head in range(4):
        for row in range(8):
            half, pair = divmod(row, 4)
            for kind in ("weight", "bias"):
                query = stored[f"model.layers.0.self_attn.q_proj.{kind}"][8 * head + row]
                reordered = tensors[f"blk.0.attn_q.{kind}"][8 * head + 2 * pair + half]
                check_equal(reordered.to(query.dtype), query)

    keys = stored["model.layers.0.self_attn.k_proj.weight"].view(2, 2, 4, 32)
    check_equal(tensors["blk.0.attn_k.weight"], keys.transpose(1, 2).reshape(16, 32))


def test_rows_of_qwen3_keep_their_order(folders) -> None:
    stored = load_file(folders("qwen3") / "model.safetensors")
    tensors = gguf_tensors(folders("qwen3") / "model.gguf")
    check_equal(tensors["blk.0.attn_q.weight"], stored["model.layers.0.self_attn.q_proj.weight"])


def test_projections_of_gpt2_are_transposed(folders) -> None:
    stored = load_file(folders("gpt2") / "model.safetensors")
    tensors = gguf_tensors(folders("gpt2") / "model.gguf")
    check_equal(tensors["blk.0.attn_qkv.weight"], stored["transformer.h.0.attn.c_attn.weight"].T)
    check_equal(tensors["position_embd.weight"], stored["transformer.wpe.weight"])


def test_filters_of_lfm2_are_matrices(folders) -> None:
    stored = load_file(folders("our lfm2") / "model.safetensors")
    tensors = gguf_tensors(folders("our lfm2") / "model.gguf")
    filters = stored["model.layers.0.conv.conv.weight"]
    check_equal(tensors["blk.0.shortconv.conv.weight"], filters.squeeze(1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "lfm2", "our lfm2"])
def test_transformers_reads_the_same_model_from_the_file(folders, name: str) -> None:
    folder = folders(name)
    ids = torch.arange(1, 61).view(2, 30)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model_of_file = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    assert torch.equal(model_of_file(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "lfm2", "our lfm2"])
def test_transformers_reads_the_same_tokenizer_from_the_file(folders, name: str) -> None:
    folder = folders(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer_of_file = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    for text in PROMPTS:
        assert tokenizer_of_file.encode(text) == tokenizer.encode(text)


# --- metadata


def test_the_file_describes_the_model(folders) -> None:
    metadata = gguf_metadata(folders("llama 3.1") / "model.gguf")
    expected = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": gguf.LlamaFileType.ALL_F32,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.freq_base": 500,
        "llama.vocab_size": VOCABULARY,
    }
    assert {key: metadata[key] for key in expected} == expected


def test_the_file_has_the_frequency_factors_of_llama3(folders) -> None:
    factors = gguf_tensors(folders("llama 3.1") / "model.gguf")["rope_freqs.weight"]
    assert factors[0] == 1, "the highest frequency stays"
    assert factors[-1] == pytest.approx(8), "the lowest is divided by the factor"


@pytest.mark.parametrize(
    ("name", "dtype", "key", "expected"),
    [
        pytest.param(
            "mistral",
            torch.float32,
            "llama.context_length",
            100,
            id="up to the sliding window, attention is full",
        ),
        pytest.param("mistral", torch.float32, "llama.rope.scaling.factor", 4, id="linear rope"),
        pytest.param(
            "our lfm2",
            torch.float32,
            "lfm2.attention.head_count_kv",
            [0, 2, 0, 2],
            id="layers without attention",
        ),
        pytest.param(
            "qwen3",
            torch.bfloat16,
            "general.file_type",
            gguf.LlamaFileType.MOSTLY_BF16,
            id="bfloat16",
        ),
    ],
)
def test_the_file_describes_what_differs_from_llama(
    folders, name: str, dtype: torch.dtype, key: str, expected: Any
) -> None:
    assert gguf_metadata(folders(name, dtype) / "model.gguf")[key] == expected


# --- the tokenizer


def test_the_file_has_a_token_for_each_embedding(folders) -> None:
    folder = folders("llama")
    metadata = gguf_metadata(folder / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == VOCABULARY
    assert tokens[-1] == "[PAD447]"

    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    types = metadata["tokenizer.ggml.token_type"]
    kinds = [gguf.TokenType(types[token]).name for token in (0, 1, im_end, im_end + 1, 447)]
    assert kinds == ["CONTROL", "NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"]


def test_the_file_has_the_merges_and_the_chat_template(folders) -> None:
    metadata = gguf_metadata(folders("llama") / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folders("llama"))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert metadata["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges]
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata["tokenizer.chat_template"] == CHATML


def test_the_file_names_both_stop_tokens(folders) -> None:
    metadata = gguf_metadata(folders("llama") / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folders("llama"))
    assert metadata["tokenizer.ggml.eos_token_id"] == 0
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert metadata["tokenizer.ggml.eot_token_id"] == im_end


@pytest.mark.parametrize(("name", "adds_bos"), [("llama", True), ("gpt2", False)])
def test_the_file_says_whether_a_text_begins_with_a_token(
    folders, name: str, adds_bos: bool
) -> None:
    metadata = gguf_metadata(folders(name) / "model.gguf")
    assert metadata["tokenizer.ggml.add_bos_token"] is adds_bos


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_name_of_a_pre_tokenizer_follows_from_its_pattern(copy, name: str) -> None:
    folder = copy("gpt2")
    tokenizer_of(name).save_pretrained(folder)
    write_gguf(folder, folder / "model.gguf", "tiny")
    assert gguf_metadata(folder / "model.gguf")["tokenizer.ggml.pre"] == name


# --- refusals


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        pytest.param(
            "llama",
            {"architectures": ["OlmoForCausalLM"]},
            "is OlmoForCausalLM; it can write Llama",
            id="class",
        ),
        pytest.param(
            "qwen3",
            {"hidden_act": "gelu"},
            "has hidden_act = 'gelu' in config.json, but llama.cpp",
            id="activation",
        ),
        pytest.param("lfm2", {"conv_bias": True}, "has conv_bias = True", id="bias"),
        pytest.param(
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            "writes those of type default, linear",
            id="rotary positions",
        ),
        pytest.param(
            "llama",
            {"num_hidden_layers": 1},
            "model.layers.1.* has no place for",
            id="more layers than in the configuration",
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_differently_is_refused(
    copy, name: str, settings: dict[str, Any], message: str
) -> None:
    folder = copy(name, **settings)
    with pytest.raises(UserError, match=message.replace("*", ".*")) as error:
        write_gguf(folder, folder / "model.gguf", "tiny")
    assert "\n" not in str(error.value)
    assert not list(folder.glob("*gguf*"))


@pytest.mark.parametrize(
    ("pre_tokenizer", "message"),
    [
        pytest.param(
            splitting(r"\p{N}{1,2}|\D+"),
            "splits text in a way that it does not know; it knows those",
            id="another pattern",
        ),
        pytest.param(
            pre_tokenizers.Metaspace(),
            "is not a byte-level BPE. For SentencePiece",
            id="SentencePiece",
        ),
    ],
)
def test_a_pre_tokenizer_that_llama_cpp_does_not_have_is_refused(
    copy, pre_tokenizer: Any, message: str
) -> None:
    folder = copy("gpt2")
    tokenizer_of("gpt-2", pre_tokenizer=pre_tokenizer).save_pretrained(folder)
    with pytest.raises(UserError, match=message):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_a_tokenizer_of_characters_is_refused(copy) -> None:
    folder = copy("gpt2")
    backend = train_tokenizer("char", iter(PROMPTS), lambda: iter(PROMPTS))
    as_pretrained(backend).save_pretrained(folder)
    with pytest.raises(UserError, match="is not a byte-level BPE"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_more_than_three_stop_tokens_are_refused(copy) -> None:
    folder = copy("gpt2")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    with pytest.raises(UserError, match="names 4 stop tokens, and a GGUF file can name 3"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_more_tokens_than_embeddings_are_refused(copy) -> None:
    folder = copy("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(50)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"has 45\d tokens, but the model only 448 embeddings"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_a_folder_without_weights_is_refused(copy) -> None:
    folder = copy("gpt2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights of a model as safetensors"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_an_unfinished_file_is_removed(copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: Any, tensor: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    folder = copy("gpt2")
    with pytest.raises(OSError, match="No space left"):
        write_gguf(folder, folder / "model.gguf", "tiny")
    assert not list(folder.glob("*gguf*"))


# --- llmtrain export --to_gguf


@pytest.fixture
def run_folder(folders, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(folders("our lfm2"), run / "model", ignore=shutil.ignore_patterns("*.gguf"))
    return run


def error_of_export(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", *arguments])
    return capsys.readouterr().err


def test_the_command_writes_the_file_beside_the_model(run_folder: Path, capsys) -> None:
    cli.main(["export", str(run_folder), "--to_gguf", "--json"])

    assert json.loads(capsys.readouterr().out) == {"model": str(run_folder / "model.gguf")}
    assert gguf_metadata(run_folder / "model.gguf")["general.name"] == "run"
    assert sorted(path.name for path in run_folder.iterdir()) == ["model", "model.gguf"]


def test_the_command_replaces_no_file(run_folder: Path, capsys) -> None:
    (run_folder / "model.gguf").touch()
    error = error_of_export(capsys, str(run_folder), "--to_gguf")
    assert "model.gguf already exists" in error


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--check", "--check loads a folder with transformers; leave it out with --to_gguf."),
        (
            "--ollama",
            "--ollama writes a Modelfile beside a model folder; leave it out with --to_gguf.",
        ),
    ],
)
def test_flags_for_a_model_folder_are_refused_with_to_gguf(
    flag: str, message: str, run_folder: Path, capsys
) -> None:
    error = error_of_export(capsys, str(run_folder), "--to_gguf", flag)

    assert error == f"error: {message}\n"
    assert not (run_folder / "model.gguf").exists()


def test_the_command_names_the_package_that_it_needs(
    run_folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    error = error_of_export(capsys, str(run_folder), "--to_gguf")
    assert "pip install 'llmtrain[gguf]'" in error


def test_an_adapter_is_merged_into_the_file(folders, tmp_path: Path, capsys) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folders("qwen2"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    run = tmp_path / "run"
    adapted.save_pretrained(run / "model")
    AutoTokenizer.from_pretrained(folders("qwen2")).save_pretrained(run / "model")

    error = error_of_export(capsys, str(run), "--to_gguf")
    assert "is an adapter; add --merge." in error
    cli.main(["export", str(run), "--to_gguf", "--merge"])

    assert f"{run}/merged.gguf holds the model" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["merged.gguf", "model"]
    merged = adapted.merge_and_unload().model.layers[1].self_attn.q_proj.weight
    weight = gguf_tensors(run / "merged.gguf")["blk.1.attn_q.weight"]
    torch.testing.assert_close(weight, merged.data)


# --- llama.cpp


class LlamaCpp:
    """A server of llama.cpp on this machine, with one model."""

    def __init__(self, model: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.n_ctx = 256
        params.n_parallel = 1
        params.cpuparams.n_threads = 1
        params.warmup = False
        params.verbosity = -1
        # In float32, so that no rounding decides between two tokens.
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        flash_attention = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = flash_attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def ask(self, path: str, **request: object) -> dict[str, Any]:
        content = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{self.server.listening_address}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, content, headers)) as answer:
            return json.load(answer)

    def tokens(self, text: str) -> list[int]:
        request = {"content": text, "add_special": True, "parse_special": True}
        return self.ask("tokenize", **request)["tokens"]

    def greedy(self, prompt: list[int]) -> list[int]:
        """Return the best tokens after a prompt. It never stops."""
        answer = self.ask(
            "completion",
            prompt=prompt,
            n_predict=NEW_TOKENS,
            temperature=0,
            ignore_eos=True,
            return_tokens=True,
        )
        return answer["tokens"]


@pytest.fixture(scope="module", params=[*CONFIGS, *OURS])
def llama_cpp_and_folder(request: pytest.FixtureRequest, folders) -> tuple[LlamaCpp, Path]:
    folder = folders(request.param)
    return LlamaCpp(folder / "model.gguf"), folder


def test_llama_cpp_tokenizes_and_continues_texts_as_transformers_does(
    llama_cpp_and_folder: tuple[LlamaCpp, Path],
) -> None:
    llama_cpp, folder = llama_cpp_and_folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop_tokens = [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]

    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        assert llama_cpp.tokens(text) == prompt
        generated = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            suppress_tokens=stop_tokens,
        )
        assert llama_cpp.greedy(prompt) == generated[0, len(prompt) :].tolist()


def test_llama_cpp_renders_the_chat_template_as_transformers_does(
    llama_cpp_and_folder: tuple[LlamaCpp, Path],
) -> None:
    llama_cpp, folder = llama_cpp_and_folder
    messages = [{"role": "user", "content": "Hi"}]
    rendered = llama_cpp.ask("apply-template", messages=messages)["prompt"]
    assert rendered == AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
