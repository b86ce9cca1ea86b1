import json
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.config import DataConfig
from llmtrain.interfaces.model import ModelBundle
from llmtrain.redaction import redacted
from llmtrain.training import opening
from llmtrain.training.opening import open_run
from llmtrain.training.rows import tokenize
from llmtrain.training.settings import RunConfig, Settings
from tests.engines import finish
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY
from tests.record.checkpoint_files import Files

LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def word(least: int, most: int, of: str = LETTERS) -> st.SearchStrategy[str]:
    return st.text(of, min_size=least, max_size=most)


NAMES = [
    "hub_token",
    "HF_TOKEN",
    "api_key",
    "openai-api-key",
    "password",
    "db_password",
    "client_secret",
    "clientSecret",
    "access_key",
    "AccountKey",
    "PGPASSWORD",
    "MYSQL_PWD",
    "Pwd",
    "GITHUB_PAT",
    "AZURE_CREDENTIALS",
]
ORDINARY = {
    "tokenizer": "bpe:4096",
    "tokens": "1000000000000000000000",
    "eos_token": "<|endoftext|>",
    "eos_id": "eos_token: <|endoftext|>, eos_token=<|endoftext|>, token: 7, token == 7",
    "text_key": "content",
    "key": "key: content, key=content",
    "speed": "1,000 tokens/s with --max_tokens 512",
    "PWD": "/home/someone",
    "environment": "PWD=/home/someone OLDPWD=/home",
    "code": "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
    "prose": "the bearer of news, Bearer authentication, the signature of a function",
    "dataset": "https://example.org:8080/a@b/data.txt",
    "checkpoint": "hf://datasets/someone/something@main",
    "fingerprint_sha256": "0123456789abcdef" * 4,
    "git_sha": "0123456789abcdef0123456789abcdef01234567",
    "output_dir": "runs/sk-learn-against-everything-else",
    "learning_rate": 3e-4,
    "report_to": ["wandb", "none"],
    "author": "someone@example.org",
    "use_auth_token": True,
    "hub_token": None,
}
SECRETS = st.one_of(  # what is a secret wherever it stands
    st.builds("hf_{}".format, word(30, 40)),
    st.builds("ghp_{}".format, word(36, 36)),
    st.builds("github_pat_{}_{}".format, word(22, 22), word(59, 59)),
    st.builds("sk-proj-A{}".format, word(40, 60, LETTERS + "-_")),
    st.builds("sk-ant-api03-{}".format, word(40, 60, LETTERS + "-_")),
    st.builds("AKIA{}".format, word(16, 16, string.ascii_uppercase + string.digits)),
    st.builds("wandb_v1_{}".format, word(40, 80, LETTERS + "_")),
    st.builds("glpat-{}".format, word(20, 20, LETTERS + "-_")),
    st.builds("xoxb-{}".format, word(20, 50, LETTERS + "-")),
    st.builds("AIza{}".format, word(35, 35, LETTERS + "-_")),
    st.builds("nvapi-{}".format, word(64, 64, LETTERS + "-_")),
    st.builds("eyJ{}.eyJ{}.{}".format, *[word(10, 60, LETTERS + "-_")] * 3),
    st.builds(
        "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----".format,
        word(40, 80, LETTERS + "+/=\n"),
    ),
)
AFFIXES = st.sampled_from(["", " ", "/", "=", "'", '"', ":", ",", "\n"])


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = word(1, 8).filter(lambda key: not re.search("(?i)pwd|pat|pass|token|secret|key", key))
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


ordinary = (
    st.sampled_from(list(ORDINARY.items())).map(lambda item: dict([item]))
    | st.text(HEX, min_size=40, max_size=64)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.lists(
        st.sampled_from(["--tokenizer", "bpe:512", "--tokens", "123456", "--seed=3", "--text_key"])
    )
)


@given(nested(ordinary))
def test_ordinary_settings_come_through_unchanged(value: Any) -> None:
    assert redacted(value) == value


@given(st.data(), SECRETS, AFFIXES, AFFIXES)
def test_a_token_of_a_known_shape_never_does(
    data: st.DataObject, secret: str, before: str, after: str
) -> None:
    value = data.draw(
        nested(st.just(f"{before}{secret}{after}")).map(lambda inner: {"a": inner, "b": (1, inner)})
    )
    hidden = redacted(value)
    assert secret not in repr(hidden)
    assert type(hidden["b"]) is tuple
    assert redacted(hidden) == hidden


@given(
    st.sampled_from(NAMES),
    word(1, 40, LETTERS + "+/._-!@,;&").filter(lambda s: not s.startswith("-")),
)
def test_what_stands_under_a_secrets_name_never_does(name: str, tail: str) -> None:
    secret = f"Q9{tail}"
    for value in (
        {name: secret},
        {name: ["x", {"y": secret}]},
        {"command": ["train.py", f"--{name}", secret, "--seed", "3"]},
        ["train.py", f"--{name}={secret}"],
        f"recipes/gpt.py --{name} {secret} --seed 3",
        f"https://example.org/a?b=c&{name}={secret}",
        json.dumps({"a": 1, name: secret}),
        f"cannot log in: {name}='{secret} and more'",
        f"{name}: {secret}",
        f"Authorization: Bearer {secret}",
        f"curl -H 'authorization: Basic {secret}'",
        f"Bearer {secret}{'x1' * 8}",
        f"https://x.org/a?sv=1&sig={secret.replace('&', '')}&se=2",
        f"https://x.org/a?X-Amz-Signature={secret.replace('&', '')}",
    ):
        hidden = redacted(value)
        assert secret not in repr(hidden)
        assert "***" in repr(hidden)
        assert type(hidden) is type(value)
        assert redacted(hidden) == hidden


@given(word(1, 12), word(1, 30, LETTERS + "!$%:@-_."))
def test_a_url_keeps_its_host_and_loses_its_user(user: str, password: str) -> None:
    for who in (f"{user}:Q9{password}", f"Q9{user}"):
        assert (
            redacted(f"see postgres://{who}@host.org:80/a?b=c now")
            == "see postgres://***@host.org:80/a?b=c now"
        )


def test_the_rest_of_a_command_line_stays() -> None:
    line = "recipes/gpt.py --hub_token Q9 --tokenizer byte --use_token --seed 3"
    expected = "recipes/gpt.py --hub_token *** --tokenizer byte --use_token --seed 3"
    assert redacted(line.split()) == expected.split()
    assert redacted("--hub_token Q9 --seed 3") == "--hub_token *** --seed 3"


def test_40_hex_digits_are_a_secret_under_the_name_of_a_key_alone() -> None:
    digits = "0123456789abcdef0123456789abcdef01234567"
    assert redacted({"wandb_key": digits, "sha": digits}) == {"wandb_key": "***", "sha": digits}
    words = ["--wandb_key", digits, "--sha", digits]
    assert redacted(words) == ["--wandb_key", "***", "--sha", digits]
    assert redacted(f"key={digits} sha={digits}") == f"key=*** sha={digits}"


def test_a_secret_of_the_environment_never_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", digits)
    monkeypatch.setenv("STORE_PASSWORD", "correct horse")
    monkeypatch.setenv("STORE_SECRET", "correct horse battery")  # holds the other
    monkeypatch.setenv("SHORT_KEY", "gpt")
    value = [f"from {digits}", {"the correct horse battery, the correct horse": "gpt"}]
    assert redacted(value) == ["from ***", {"the ***, the ***": "gpt"}]

    names = (
        "PGPASSWORD GITHUB_PAT PAT MYSQL_PWD MY_PASSWD AZURE_CREDENTIALS TOKEN PASSWORD SSH_PASS"
    )
    for number, name in enumerate(names.split()):
        monkeypatch.setenv(name, f"correct-horse-{number}")
        assert redacted(f"the correct-horse-{number} of a battery") == "the *** of a battery"


def test_ordinary_variables_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = {
        "PWD": "/home/someone/work",
        "OLDPWD": "/home/someone",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/someone/key.json",
        "EOS_TOKEN": "<|endoftext|>",
        "KEYBOARD": "a keyboard",
    }
    for name, value in ordinary.items():
        monkeypatch.setenv(name, value)
    assert redacted([*ordinary.values()]) == [*ordinary.values()]


def test_no_secret_reaches_any_file_of_a_run(
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "Q9" * 20)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--hub_token", "Q9word", "--dataset", "https://me:Q9pass@host/x"]
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *words])
    settings = {
        "hub_token": {"value": "Q9word", "from": "command line"},
        "dataset": {"value": ["https://me:Q9pass@host/x"], "from": "command line"},
        "data": {"value": {"api_key": "Q9word"}, "from": "recipe"},
        "seed": {"value": 3, "from": "recipe"},
    }
    monkeypatch.setattr(opening, "resolved", lambda _: settings)
    monkeypatch.setattr(opening, "run_fingerprint", lambda *_: {"seed": 3})
    texts = ["a text", "another text", "and more of it"]
    rows = tokenize(DataConfig(tokenizer="byte"), 8, records=texts)
    s = Settings(
        data=DataConfig(),
        run=RunConfig(output_dir=str(tmp_path / "run"), report_to=["wandb", "tensorboard"]),
    )
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with open_run(accelerator, s, rows, ModelBundle(model, Files()), optimizer) as run:

        def fail_to_log(*_: object, **__: object) -> None:
            raise FileNotFoundError(2, "No such file or directory", "https://me:Q9pass@host/x")

        monkeypatch.setattr(TensorBoardTracker, "log", fail_to_log)
        run.log({"train/loss": 1.0})
        finish(run, model)
    folder = run.folder
    record = json.loads((folder / "run.json").read_text())
    assert record["settings"]["hub_token"]["value"] == "***"
    assert record["settings"]["seed"]["value"] == 3
    command = record["starts"][0]["command"][1:]
    assert command == ["--hub_token", "***", "--dataset", "https://***@host/x"]
    assert sys.argv[2] == "Q9word"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"Q9" in path.read_bytes()] == []
    said = capsys.readouterr()
    assert "tensorboard: tracking stopped" in said.err
    assert "Q9" not in said.out + said.err


def test_no_secret_of_a_path_reaches_the_output_or_a_file_of_a_finished_run(tmp_path: Path) -> None:
    """Its model card is published, and its output is a page of W&B."""
    secrets = {name: f"Q9zz{name.lower()}" for name in ("PGPASSWORD", "GITHUB_PAT", "HF_TOKEN")}
    data = tmp_path / "-".join(secrets.values()) / f"glpat-Q9zz{'x' * 18}.txt"
    data.parent.mkdir()
    data.write_text("The model reads a text. " * 100)
    folder = tmp_path / "run"
    words = [*PYTHON, GPT, *TINY, "--dataset", str(data), "--output_dir", str(folder)]

    ended = run_forked([*words, "--report_to", "wandb"], secrets | {"WANDB_MODE": "offline"})

    ended.assert_ok()
    assert "***" in ended.out
    assert "Q9zz" not in ended.out + ended.err
    assert "***" in (folder / "model" / "README.md").read_text()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if b"Q9zz" in path.read_bytes()] == []
