"""`llmtrain tokenize --to s3://...` makes the set of a folder, whatever interrupts it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain import storage
from llmtrain.data import shards
from llmtrain.data import tokenizer as tok
from llmtrain.data.config import DataConfig
from llmtrain.data.remote_sets import open_remote
from llmtrain.data.tokenized import Tokenized
from llmtrain.storage import Storage
from tests.buckets import Proxy, bucket_server
from tests.data.chat_records import chat_records
from tests.data.preparation import write_records, write_texts
from tests.launching import FINETUNE, GPT, PYTHON, ROOT
from tests.models.small_models import tiny_llama
from tests.system.test_scored_rows import DISTILL, SCORED_SHARD, write_model
from tests.system.test_tokenize import TEXTS, Capture, contents_of, tokenize

ADDRESS = "s3://bucket/sets/texts"
# A process whose shards have as many records as those of this one.
SMALL_SHARDS = """
from llmtrain.cli import main
from llmtrain.data import shards
shards.SHARD_RECORDS = 7
main()
"""


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(shards, "SHARD_RECORDS", 7)
    monkeypatch.setattr(storage, "PATIENCE", 3.0)
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """The recipe, and its flags for six shards of texts and a tokenizer in a folder."""
    trained = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8)
    trained.save_pretrained(tmp_path / "tokenizer")
    texts = write_texts(tmp_path / "texts.jsonl", TEXTS)
    data = ["--dataset", str(texts), "--tokenizer", str(tmp_path / "tokenizer")]
    return [GPT, *data, "--block_size", "16", "--eval_fraction", "0.2"]


def made_locally(capsys: Capture, flags: list[str], folder: Path) -> tuple[dict, dict[str, bytes]]:
    """Make the set in a folder, and return its manifest and its shards, named by their hashes."""
    assert tokenize(capsys, *flags, "--to", folder)[0] == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    for source in (*manifest["train"], *manifest["eval"]):
        for shard in source["shards"]:
            shard["file"] = f"{shard['sha256']}.safetensors"
    contents = contents_of(folder).values()
    return manifest, {f"{sha256(data).hexdigest()}.safetensors": data for data in contents}


def assert_is_at(address: str, expected: tuple[dict, dict[str, bytes]]) -> None:
    """Compare the objects with a set that was made in a folder, apart from the seal and names."""
    manifest, contents = expected
    bucket = Storage(address)
    names = {*contents, *manifest["tokenizer"], "manifest.json"}
    assert names == {*bucket.sizes()}
    assert contents == {name: bucket.read(name) for name in contents}
    for name, facts in manifest["tokenizer"].items():
        assert sha256(bucket.read(name)).hexdigest() == facts["sha256"]
    at_address = json.loads(bucket.read("manifest.json"))
    assert at_address.pop("sha256") != manifest["sha256"]  # names are content
    assert at_address == {name: manifest[name] for name in at_address}


def uploads(proxy: Proxy, part: str = "") -> list[str]:
    return [path for method, path, _ in proxy.requests if method == "PUT" and part in path]


@pytest.mark.parametrize("kind", ["texts", "trained tokenizer", "conversations", "scores"])
def test_a_set_at_an_address_is_that_of_a_folder(kind, tmp_path, capsys, proxy, flags, monkeypatch):
    if kind == "trained tokenizer":
        flags += ["--tokenizer", "bpe:300"]
    if kind == "conversations":
        chats = write_records(tmp_path / "chats.jsonl", chat_records(30))
        flags = [FINETUNE, *flags[1:5], "--dataset", str(chats), "--max_length", "auto"]
    if kind == "scores":
        monkeypatch.setattr(shards, "SHARD_RECORDS", SCORED_SHARD)
        teacher = str(write_model(tmp_path / "teacher", tiny_llama(), seed=1))
        flags = [DISTILL, *flags[1:3], "--max_length", "32", "--model_name_or_path", teacher]
        flags += ["--teacher_model_name_or_path", teacher, "--loss_top_k", "3"]
    expected = made_locally(capsys, flags, tmp_path / "set")
    requests = count()
    local_shards = set()

    def fault(method: str, path: str) -> str:
        found = (tmp_path / "cache" / "making").rglob("*.safetensors")
        local_shards.add(len([*found]))
        return "503" if next(requests) % 5 == 3 else ""

    proxy.fault = fault
    status, out, _ = tokenize(capsys, *flags, "--to", ADDRESS, "--json")

    assert status == 0
    facts = json.loads(out)
    assert (facts["folder"], facts["files"]) == (ADDRESS, len(expected[1]))
    assert_is_at(ADDRESS, expected)
    assert uploads(proxy)[-1].endswith("/manifest.json")
    assert local_shards == {0, 1}
    assert not [*(tmp_path / "cache" / "making").rglob("[!.]*.*")]

    local = Tokenized.open(tmp_path / "set")
    remote = open_remote(ADDRESS, "", DataConfig())
    for split in ("train", "eval"):
        columns = [getattr(rows, split).column("input_ids").tolist() for rows in (remote, local)]
        assert columns[0] == columns[1]

    _, out, err = tokenize(capsys, *flags, "--to", ADDRESS)
    assert f"{ADDRESS} is complete already" in err
    assert f"{ADDRESS}: {facts['rows']:,} rows of" in out
    other = tokenize(capsys, *flags, "--eval_fraction", "0.3", "--to", ADDRESS)
    assert f"{ADDRESS} is another set" in other[2]


def test_a_start_after_kills_uploads_what_is_missing(tmp_path, capsys, proxy, flags):
    expected = made_locally(capsys, flags, tmp_path / "set")
    # The fifth upload is lost, then the next start's third one arrives after its process is gone.
    for number, answer in ((5, "reset"), (3, "")):
        processes: list[subprocess.Popen] = []
        requests = count(1)

        def fault(
            method: str, path: str, at=number, answer=answer, running=processes, seen=requests
        ):
            if method == "PUT" and next(seen) == at:
                os.kill(running[0].pid, signal.SIGKILL)
                running[0].wait()
                return answer
            return ""

        proxy.fault = fault
        command = [*PYTHON, "-c", SMALL_SHARDS, "tokenize", *flags, "--to", ADDRESS]
        processes.append(subprocess.Popen(command, cwd=ROOT))
        assert processes[0].wait() == -signal.SIGKILL
        assert "manifest.json" not in Storage(ADDRESS).sizes()
        assert [*(tmp_path / "cache" / "making").rglob("*.safetensors")] != []

    proxy.fault = lambda method, path: ""
    # The files that the killed processes have left on this disk are not those of another address.
    for address in ("s3://bucket/other", ADDRESS):
        assert tokenize(capsys, *flags, "--to", address)[0] == 0
        assert_is_at(address, expected)
    assert sorted(uploads(proxy)) == sorted({*uploads(proxy)})
    assert len(uploads(proxy, ".safetensors")) == 2 * len(expected[1])
    assert not [*(tmp_path / "cache" / "making").rglob("[!.]*.*")]


def test_machines_that_share_nothing_make_parts(tmp_path, capsys, monkeypatch, proxy, flags):
    expected = made_locally(capsys, flags, tmp_path / "set")

    def tokenize_on(machine: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / machine))
        return tokenize(capsys, *flags, "--to", ADDRESS, *words)

    status, out, _ = tokenize_on("second", "--shard", "2/2")
    assert status == 0
    assert "part 2 of 2 is made" in out
    assert f"{ADDRESS}: 3 shards of" in tokenize_on("third", "--finish")[2]
    other = tokenize_on("first", "--shard", "1/2", "--eval_fraction", "0.3")
    assert f"{ADDRESS} has shards of another set" in other[2]
    assert tokenize_on("first", "--shard", "1/2")[0] == 0
    proxy.requests.clear()
    assert tokenize_on("third", "--finish")[0] == 0

    assert_is_at(ADDRESS, expected)
    assert uploads(proxy, ".safetensors") == []


def test_what_cannot_be_made_at_an_address_is_one_line(capsys, monkeypatch, proxy, flags):
    flags += ["--tokenizer", "byte"]

    def error_of(address: str) -> str:
        status, _, err = tokenize(capsys, *flags, "--to", address)
        assert status == 2
        return err.splitlines()[-1]

    assert "no address that can be written" in error_of("https://host/set")
    assert "there is no such bucket" in error_of("s3://elsewhere/set")
    Storage("s3://bucket/other", writable=True).write("notes.txt", b"")
    assert "has other files; name a new folder" in error_of("s3://bucket/other")

    proxy.fault = lambda method, path: "503" if "shard-0-00002" in path else ""
    assert "the storage does not answer" in error_of(ADDRESS)
    proxy.fault = lambda method, path: ""
    with monkeypatch.context() as patch:
        # Another version of the library trains another tokenizer.
        other = tok.train_tokenizer("bpe:300", TEXTS, lambda: iter(TEXTS))
        patch.setattr(tok, "train_tokenizer", lambda *_, **__: other)
        assert "has shards of another set: its data, tokenizer" in error_of(ADDRESS)
    # Consoles mark a new folder by such an object.
    Storage("s3://bucket/sets", writable=True).write("texts/", b"")
    assert tokenize(capsys, *flags, "--to", ADDRESS)[0] == 0
