"""Eval data of one's own: other files or other splits are evaluated on, and nothing of --dataset is kept back."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from llmtrain.data.config import ChatConfig, DataConfig, PairConfig, RowConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.tokenized import short_names
from llmtrain.errors import UserError
from tests.data.test_prepare import documents_of, left_behind
from tests.launching import GPT, ROOT, TINY, series

BLOCK = 95


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text(name: str) -> dict:
    return {"text": f"a document about {name}, and more words"}


def chat(name: str) -> dict:
    return {"prompt": f"{name}?", "completion": f"it is {name}"}


def pair(name: str) -> dict:
    return {"prompt": f"{name}?", "chosen": f"it is {name}", "rejected": f"not {name}"}


# What a recipe passes as `chat`, and how a record of its data looks.
TASKS = {"text": (None, text), "chats": (ChatConfig, chat), "pairs": (PairConfig, pair)}


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config(*dataset: str, **settings: Any) -> DataConfig:
    return DataConfig(dataset=list(dataset), tokenizer="byte", **settings)


def shown(rows: Any, made: Tokenized) -> str:
    """The text of some rows, without what the chat template adds."""
    overlap = 1 if made.metadata.task == "text" else 0
    texts = []
    for row in rows:
        tokens = row["input_ids"][: len(row["input_ids"]) - overlap]
        texts.append(made.tokenizer.decode([token for token in tokens if token >= 0]))
    return "".join(texts)


def complaint(config: DataConfig, chat: RowConfig | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        tokenize(config, BLOCK, chat, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_short_name_keeps_a_version_number() -> None:
    names = ["teknium/OpenHermes-2.5", "data/easy.v2.jsonl.gz", "builtin:python-docs"]
    assert short_names(names) == ["OpenHermes-2.5", "easy.v2", "builtin:python-docs"]


@pytest.mark.parametrize("task", TASKS)
def test_eval_files_are_evaluated_on_and_all_training_data_are_trained_on(tmp_path, task):
    chat_config, record = TASKS[task]
    train = [f"train{i:02}" for i in range(30)]
    first = [f"first{i:02}" for i in range(4)]
    second = [f"second{i:02}" for i in range(9)]
    paths = [
        write(tmp_path / f"{name}.jsonl", list(map(record, names)))
        for name, names in [("t", train), ("a", first), ("b", second)]
    ]
    made = tokenize(config(paths[0], eval_dataset=paths[1:]), BLOCK, chat_config and chat_config())
    metadata = made.metadata
    assert (metadata.records, metadata.eval_records) == (43, 13)
    for rows, names, others in [
        (made.train, train, first + second),
        (made.eval, first + second, train),
    ]:
        content = shown(rows, made)
        assert all(name in content for name in names)
        assert not any(name in content for name in others)

    assert made.eval_sources == {
        "a": metadata.eval_source_rows[0],
        "b": metadata.eval_source_rows[1],
    }
    assert sum(metadata.eval_source_rows) == metadata.eval_rows == len(made.eval)
    assert metadata.source_rows == [metadata.train_rows]
    rows_of_a = [made.eval[i] for i in range(metadata.eval_source_rows[0])]
    assert "second" not in shown(rows_of_a, made)


def test_one_eval_file_beside_two_training_files_is_the_eval_data(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.jsonl", [text(name)]) for name in "abc")
    made = tokenize(config(a, b, eval_dataset=[c], mixture=[3, 1]), 8)
    assert documents_of(made.eval, made) == [text("c")["text"]]
    assert made.eval_sources == {}  # one loss is enough for one source
    assert made.mixture is not None
    assert made.mixture.sizes == made.metadata.source_rows


def test_the_names_of_losses_are_those_of_eval_files_without_folders_and_suffixes(tmp_path):
    (tmp_path / "x").mkdir()
    names = ["hard.v2.jsonl", "x/easy.ndjson"]
    paths = [write(tmp_path / name, [text(name)]) for name in names]
    train = write(tmp_path / "train.jsonl", [text("train")])
    assert [*tokenize(config(train, eval_dataset=paths), 8).eval_sources] == ["hard.v2", "easy"]


def test_eval_data_are_part_of_the_cache_key_and_of_the_data_hash(tmp_path, capsys):
    def made(train: list[str], eval: list[str]) -> str:
        made = tokenize(config(*train, eval_dataset=eval), 8)
        return made.metadata.data_sha256

    a, b, c = (write(tmp_path / f"{name}.jsonl", [text(name)]) for name in "abc")
    variants = [([a], [b]), ([a], [c]), ([a], [b, c]), ([a, b], [c]), ([b], [a]), ([a, b, c], [])]
    hashes = {made(*variant) for variant in variants}
    assert len(hashes) == len(variants)
    assert "from the cache" not in capsys.readouterr().out
    write(tmp_path / "b.jsonl", [text("b"), text("another b")])
    assert made([a], [b]) not in hashes
    made([a], [b])
    assert "from the cache" in capsys.readouterr().out


def test_the_log_names_the_eval_data(tmp_path, capsys):
    train, eval = (write(tmp_path / f"{name}.jsonl", [text(name)]) for name in ("t", "e"))
    tokenize(config(train, eval_dataset=[eval]), 8)
    assert f"eval      the eval data are {eval}\n" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_eval_data_without_a_usable_record_are_an_error(tmp_path, cache, task):
    chat_config, record = TASKS[task]
    train = write(tmp_path / "t.jsonl", [record(str(i)) for i in range(9)])
    flags = chat_config and chat_config(on_bad_row="skip")
    bad: list[list[Any]] = [[]]
    if task == "text":
        bad.append([{"text": ""}])
    if task == "chats":
        bad.append([{"prompt": "a", "completion": "b" * 500}])
        bad.append([{"prompt": "a", "completion": ""}])
    if task == "pairs":
        bad.append([{"prompt": "a", "chosen": "b" * 500, "rejected": "c"}])
        bad.append([{"prompt": "a", "chosen": "b", "rejected": "b"}])
    for records in bad:
        path = write(tmp_path / "e.jsonl", records)
        message = complaint(config(train, eval_dataset=[path]), flags)
        assert message.startswith(f"--eval_dataset {path}")
        assert left_behind(cache) == []


def test_bad_eval_records_are_counted_as_eval_records(tmp_path, capsys):
    train = write(tmp_path / "t.jsonl", [chat(str(i)) for i in range(9)])
    eval = write(tmp_path / "e.jsonl", [chat("a"), {"prompt": "b", "completion": ""}])
    made = tokenize(config(train, eval_dataset=[eval]), BLOCK, ChatConfig(on_bad_row="skip"))
    assert made.metadata.audit is not None
    assert made.metadata.eval_audit is not None
    assert (made.metadata.audit["bad"], made.metadata.eval_audit["bad"]) == (0, 1)
    assert "eval      1 of 2 conversations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval_dataset": ["./absent.jsonl"]}, "--eval_dataset ./absent.jsonl: no file"),
        ({"eval_dataset": ["builtin:nothing"]}, "--eval_dataset builtin:nothing does not exist"),
        ({"dataset_test_split": "test"}, "--dataset_test_split test: "),
        ({"dataset_train_split": "train_sft"}, "--dataset_train_split train_sft: "),
        (
            {"eval_dataset": ["builtin:python-docs"], "dataset_test_split": "test"},
            "--dataset_test_split test: builtin:python-docs has no splits",
        ),
    ],
)
def test_wrong_names_of_eval_data_are_one_line(tmp_path, cache, settings, expected):
    train = write(tmp_path / "t.jsonl", [text("t")])
    assert complaint(config(train, **settings)).startswith(expected)
    assert left_behind(cache) == []


def test_conversations_can_be_evaluated_on_text(tmp_path):
    train = write(tmp_path / "t.jsonl", [chat(str(i)) for i in range(9)])
    eval = write(tmp_path / "e.jsonl", [text("e" * 200)])
    made = tokenize(config(train, eval_dataset=[eval]), 32, ChatConfig())
    assert made.eval.column_names == made.train.column_names
    assert made.metadata.eval_tokens == len(text("e" * 200)["text"]) + 1
    assert made.metadata.source_targets == [made.metadata.train_tokens]


@pytest.mark.parametrize("name", ["eval_dataset", "dataset_test_split", "dataset_train_split"])
def test_an_empty_name_is_one_line(name):
    with pytest.raises(UserError, match=f"--{name} is empty"):
        DataConfig(**{name: [""] if name == "eval_dataset" else ""})


@pytest.fixture
def _fresh_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_state")
def test_a_run_logs_a_loss_of_each_eval_file(tmp_path, text_file):
    paths = [write(tmp_path / f"{name}.jsonl", [text(name)] * 20) for name in ("seen", "new")]
    flags = ["--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    main = runpy.run_path(str(ROOT / GPT))["main"]
    main([*TINY, *flags, "--eval_dataset", *paths])
    for key in ("eval/loss", "eval/loss/seen", "eval/loss/new"):
        assert [*series(tmp_path / "run", key)] == [0, 6]

    with pytest.raises(UserError, match=r"--eval_fraction keeps a share .* --eval_dataset names"):
        main([*TINY, *flags, "--eval_dataset", *paths, "--eval_fraction", "0.1"])
    with pytest.raises(UserError, match=r"--eval_fraction keeps .* --dataset_test_split names"):
        main([*TINY, *flags, "--dataset_test_split", "test", "--eval_fraction", "0.1"])


@pytest.mark.parametrize("kind", ["list", "data set", "function"])
def test_records_in_python_are_tokenised_beside_eval_files(tmp_path, kind):
    names = [f"train{i:02}" for i in range(9)]
    records: Any = [chat(name) for name in names]
    if kind == "data set":
        records = datasets.Dataset.from_list(records)
    if kind == "function":
        records = [chat(name) for name in names].copy
    eval = write(tmp_path / "e.jsonl", [chat("eval")])
    made = tokenize(
        DataConfig(tokenizer="byte", eval_dataset=[eval]), BLOCK, ChatConfig(), records=records
    )
    assert all(name in shown(made.train, made) for name in names)
    assert "eval" in shown(made.eval, made)
    assert (made.metadata.records, made.metadata.eval_records) == (10, 1)


@pytest.mark.parametrize("name", ["dataset", "dataset_train_split", "dataset_test_split"])
def test_a_recipe_with_its_own_records_takes_no_flag_that_names_others(name):
    data = DataConfig(tokenizer="byte")
    data.origins = {name: "command line"}
    if name == "dataset_test_split":
        data.dataset_test_split = "test"
    assert complaint(data, records=["a text"]).startswith(f"--{name}: this recipe has its own data")
