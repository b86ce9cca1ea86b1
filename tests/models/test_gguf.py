"""A model as a GGUF file: what the file holds, what transformers reads, what llama.cpp computes."""

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a model folder with its GGUF file, once each."""
    made: dict[tuple, Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = write_folder(tmp_path_factory.mktemp("model"), name, dtype)
            write_gguf(made[name, dtype], made[name, dtype] / "model.gguf", "tiny")
        return made[name, dtype]

    return folder


@pytest.fixture
def copy(folders: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a model folder, with other settings in ``config.json``."""

    def copied(name: str, **settings: object) -> Path:
        folder = shutil.copytree(folders(name), tmp_path / "copy", dirs_exist_ok=True)
        (folder / "model.gguf").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return copied


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.frombuffer(
            bytearray(tensor.data.tobytes()), dtype=dtypes[tensor.tensor_type.name]
        )
        tensors[tensor.name] = values.view(*reversed(tensor.shape.tolist()))
    return tensors


def metadata_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.values()
    return {field.name: field.contents() for field in fields}


def assert_holds(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_weight_is_in_the_file_to_the_bit(
    folders: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = folders("llama, biases, tied", dtype)
    stored = load_file(folder / "model.safetensors")
    found = tensors_of(folder / "model.gguf")

    assert len(found) == len(stored)
    assert_holds(found["token_embd.weight"], stored["model.embed_tokens.weight"])
    assert_holds(found["blk.1.ffn_up.weight"], stored["model.layers.1.mlp.up_proj.weight"])
    assert_holds(found["blk.1.attn_v.weight"], stored["model.layers.1.self_attn.v_proj.weight"])
    norm = stored["model.layers.1.input_layernorm.weight"]
    assert_holds(found["blk.1.attn_norm.weight"], norm.float())

    # llama.cpp rotates row 2 i of a head with row 2 i + 1, transformers row i with row i + 4.
    for head in range(4):
        for row in range(8):
            half, pair = divmod(row, 4)
            for kind in ("weight", "bias"):
                query = stored[f"model.layers.0.self_attn.q_proj.{kind}"][8 * head + row]
                target = found[f"blk.0.attn_q.{kind}"][8 * head + 2 * pair + half]
                assert torch.equal(target.to(query.dtype), query)
    keys = stored["model.layers.0.self_attn.k_proj.weight"].view(2, 2, 4, 32)
    assert_holds(found["blk.0.attn_k.weight"], keys.transpose(1, 2).reshape(16, 32))


def test_other_classes_keep_their_rows(folders: Callable[..., Path]) -> None:
    stored = load_file(folders("qwen3") / "model.safetensors")
    found = tensors_of(folders("qwen3") / "model.gguf")
    assert_holds(found["blk.0.attn_q.weight"], stored["model.layers.0.self_attn.q_proj.weight"])

    stored = load_file(folders("gpt2") / "model.safetensors")
    found = tensors_of(folders("gpt2") / "model.gguf")
    assert_holds(found["blk.0.attn_qkv.weight"], stored["transformer.h.0.attn.c_attn.weight"].T)
    assert_holds(found["position_embd.weight"], stored["transformer.wpe.weight"])

    stored = load_file(folders("our lfm2") / "model.safetensors")
    found = tensors_of(folders("our lfm2") / "model.gguf")
    filters = stored["model.layers.0.conv.conv.weight"]
    assert_holds(found["blk.0.shortconv.conv.weight"], filters.squeeze(1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "lfm2", "our lfm2"])
def test_transformers_reads_the_same_model_from_the_file(
    folders: Callable[..., Path], name: str
) -> None:
    tokens = torch.arange(1, 61).view(2, 30)
    folder = folders(name)
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    again = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    assert torch.equal(again(tokens).logits, expected)

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    stored = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.encode(text) for text in PROMPTS] == [stored.encode(t) for t in PROMPTS]


def test_the_file_describes_the_model(folders: Callable[..., Path]) -> None:
    metadata = metadata_of(folders("llama 3.1") / "model.gguf")
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
        "llama.vocab_size": 448,
    }
    assert {key: metadata[key] for key in expected} == expected
    factors = tensors_of(folders("llama 3.1") / "model.gguf")["rope_freqs.weight"]
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)

    metadata = metadata_of(folders("mistral") / "model.gguf")
    assert metadata["llama.context_length"] == 100  # up to its window, it attends to everything
    assert metadata["llama.rope.scaling.factor"] == 4
    metadata = metadata_of(folders("our lfm2") / "model.gguf")
    assert metadata["lfm2.attention.head_count_kv"] == [0, 2, 0, 2]
    metadata = metadata_of(folders("qwen3", torch.bfloat16) / "model.gguf")
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


def test_the_file_holds_the_tokenizer(folders: Callable[..., Path]) -> None:
    folder = folders("llama")
    metadata = metadata_of(folder / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == 448
    assert tokens[-1] == "[PAD447]"
    types = metadata["tokenizer.ggml.token_type"]
    kinds = [gguf.TokenType(types[index]).name for index in (0, 1, im_end, im_end + 1, 447)]
    assert kinds == ["CONTROL", "NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert metadata["tokenizer.ggml.merges"] == [" ".join(merge) for merge in merges]
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata["tokenizer.chat_template"] == CHATML

    # It stops at both tokens of generation_config.json.
    assert metadata["tokenizer.ggml.eos_token_id"] == 0
    assert metadata["tokenizer.ggml.eot_token_id"] == im_end
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert not metadata_of(folders("gpt2") / "model.gguf")["tokenizer.ggml.add_bos_token"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_name_of_a_pre_tokenizer_follows_from_its_pattern(
    copy: Callable[..., Path], name: str
) -> None:
    folder = copy("gpt2")
    tokenizer_of(name).save_pretrained(folder)
    write_gguf(folder, folder / "model.gguf", "tiny")
    assert metadata_of(folder / "model.gguf")["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"architectures": ["OlmoForCausalLM"]}, "is OlmoForCausalLM; it can write Llama"),
        ("qwen3", {"hidden_act": "gelu"}, "has hidden_act = 'gelu' in config.json, but llama.cpp"),
        ("lfm2", {"conv_bias": True}, "has conv_bias = True"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            "writes those of type default, linear",
        ),
        ("llama", {"num_hidden_layers": 1}, "model.layers.1.* has no place for"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_in_another_way_is_refused(
    copy: Callable[..., Path], name: str, settings: dict, message: str
) -> None:
    folder = copy(name, **settings)
    with pytest.raises(UserError, match=message.replace("*", ".*")) as error:
        write_gguf(folder, folder / "model.gguf", "tiny")
    assert "\n" not in str(error.value)
    assert not list(folder.glob("*gguf*"))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            splitting(r"\p{N}{1,2}|\D+"),
            "splits text in a way that it does not know; it knows those",
        ),
        (pre_tokenizers.Metaspace(), "is not a byte-level BPE. For SentencePiece"),
        ("char", "is not a byte-level BPE"),
    ],
    ids=["another pattern", "SentencePiece", "char"],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(
    copy: Callable[..., Path], tokenizer: Any, message: str
) -> None:
    folder = copy("gpt2")
    if isinstance(tokenizer, str):
        made = as_pretrained(train_tokenizer(tokenizer, iter(PROMPTS), lambda: iter(PROMPTS)))
    else:
        made = tokenizer_of("gpt-2", pre_tokenizer=tokenizer)
    made.save_pretrained(folder)
    with pytest.raises(UserError, match=message):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_tokens_that_do_not_fit_are_refused(copy: Callable[..., Path]) -> None:
    folder = copy("gpt2")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    with pytest.raises(UserError, match="names 4 stop tokens, and a GGUF file can name 3"):
        write_gguf(folder, folder / "model.gguf", "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(50)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"has 45\d tokens, but the model only 448 embeddings"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_an_unfinished_file_is_removed(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(writer: Any, tensor: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full_disk)
    folder = copy("gpt2")
    with pytest.raises(OSError, match="No space left"):
        write_gguf(folder, folder / "model.gguf", "tiny")
    assert not list(folder.glob("*gguf*"))

    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights of a model as safetensors"):
        write_gguf(folder, folder / "model.gguf", "tiny")


def test_the_command_writes_beside_the_model(
    folders: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders("our lfm2"), run / "model", ignore=shutil.ignore_patterns("*.gguf"))
    cli.main(["export", str(run), "--to_gguf", "--json"])
    assert json.loads(capsys.readouterr().out) == {"model": str(run / "model.gguf")}
    assert metadata_of(run / "model.gguf")["general.name"] == "run"
    assert sorted(path.name for path in run.iterdir()) == ["model", "model.gguf"]

    def refused(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            cli.main(["export", str(run), "--to_gguf", *words])
        return capsys.readouterr().err

    another = ("--to", str(run / "another.gguf"))
    assert "model.gguf already exists" in refused()
    assert "leave it out with --to_gguf" in refused("--check", *another)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'llmtrain[gguf]'" in refused(*another)


def test_an_adapter_is_merged_into_the_file(
    folders: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folders("qwen2"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "run" / "model")
    AutoTokenizer.from_pretrained(folders("qwen2")).save_pretrained(tmp_path / "run" / "model")

    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", str(tmp_path / "run"), "--to_gguf"])
    assert "is an adapter; add --merge." in capsys.readouterr().err
    cli.main(["export", str(tmp_path / "run"), "--to_gguf", "--merge"])
    assert f"{tmp_path}/run/merged.gguf holds the model" in capsys.readouterr().out

    found = tensors_of(tmp_path / "run" / "merged.gguf")["blk.1.attn_q.weight"]
    merged = adapted.merge_and_unload().model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(found, merged.data)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["merged.gguf", "model"]


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
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
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


@pytest.mark.parametrize("name", [*CONFIGS, *OURS])
def test_llama_cpp_makes_the_same_tokens_of_texts_and_continues_them_in_the_same_way(
    folders: Callable[..., Path], name: str
) -> None:
    llama = LlamaCpp(folders(name) / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(folders(name))
    tokenizer = AutoTokenizer.from_pretrained(folders(name))
    stops = [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]

    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        assert llama.tokens(text) == prompt
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            suppress_tokens=stops,
        )
        assert llama.greedy(prompt) == expected[0, len(prompt) :].tolist()

    messages = [{"role": "user", "content": "Hi"}]
    rendered = llama.ask("apply-template", messages=messages)["prompt"]
    assert rendered == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
