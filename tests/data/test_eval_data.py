"""--eval_dataset and --dataset_test_split choose eval data; all of --dataset is then trained on."""

import runpy
from collections.abc import Iterator
from typing import Any

import datasets
import pytest

from llmtrain.data.config import ChatConfig, DataConfig, RowConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.tokenized import short_names
from llmtrain.errors import UserError
from tests.data.preparation import complaint, documents_of, left_behind
from tests.data.tasks import TASKS, completion_record, shown, text_record, write_dataset
from tests.launching import GPT, ROOT, TINY, series

pytestmark = pytest.mark.usefixtures("cache")

BLOCK = 95


def chat_config(task: str, **settings: Any) -> RowConfig | None:
    config_type, _ = TASKS[task]
    return None if config_type is None else config_type(**settings)


def config(*dataset: str, **settings: Any) -> DataConfig:
    return DataConfig(dataset=list(dataset), tokenizer="byte", **settings)


# --- rows


@pytest.fixture(params=TASKS)
def three_files(tmp_path, request) -> Tokenized:
    """Rows of one training file and two eval files, for each task."""
    record = TASKS[request.param][1]
    train = write_dataset(tmp_path / "t.jsonl", [record(f"train{i:02}") for i in range(30)])
    a = write_dataset(tmp_path / "a.jsonl", [record(f"first{i:02}") for i in range(4)])
    b = write_dataset(tmp_path / "b.jsonl", [record(f"second{i:02}") for i in range(9)])
    return tokenize(config(train, eval_dataset=[a, b]), BLOCK, chat_config(request.param))


def test_training_data_are_trained_on_and_eval_data_evaluated_on(three_files):
    assert three_files.metadata.records == 30 + 4 + 9
    assert three_files.metadata.eval_records == 4 + 9
    assert three_files.metadata.source_rows == [three_files.metadata.train_rows]

    train = shown(three_files.train, three_files)
    assert all(f"train{i:02}" in train for i in range(30))
    assert "first" not in train
    assert "second" not in train

    rows_of_a, rows_of_b = three_files.metadata.eval_source_rows
    assert three_files.eval_sources == {"a": rows_of_a, "b": rows_of_b}
    assert rows_of_a + rows_of_b == three_files.metadata.eval_rows == len(three_files.eval)
    a = shown([three_files.eval[i] for i in range(rows_of_a)], three_files)
    b = shown([three_files.eval[rows_of_a + i] for i in range(rows_of_b)], three_files)
    assert all(f"first{i:02}" in a for i in range(4))
    assert all(f"second{i:02}" in b for i in range(9))
    assert "second" not in a
    assert "first" not in b


def test_one_eval_file_of_two_training_files_has_no_loss_of_its_own(tmp_path):
    a, b, c = (write_dataset(tmp_path / f"{name}.jsonl", [text_record(name)]) for name in "abc")
    tokenized = tokenize(config(a, b, eval_dataset=[c], mixture=[3, 1]), 8)
    assert documents_of(tokenized.eval, tokenized) == [text_record("c")["text"]]
    assert tokenized.eval_sources == {}
    assert tokenized.mixture is not None
    assert tokenized.mixture.sizes == tokenized.metadata.source_rows


def test_bad_eval_records_are_counted_as_eval_records(tmp_path, capsys):
    train = write_dataset(tmp_path / "t.jsonl", [completion_record(str(i)) for i in range(9)])
    eval = write_dataset(
        tmp_path / "e.jsonl", [completion_record("a"), {"prompt": "b", "completion": ""}]
    )
    data = config(train, eval_dataset=[eval])
    metadata = tokenize(data, BLOCK, ChatConfig(on_bad_row="skip")).metadata
    assert metadata.audit["bad"] == 0
    assert metadata.eval_audit["bad"] == 1
    assert "eval      1 of 2 conversations" in capsys.readouterr().out


def test_the_data_hash_differs_for_each_choice_of_training_and_eval_files(tmp_path, capsys):
    a, b, c = (write_dataset(tmp_path / f"{name}.jsonl", [text_record(name)]) for name in "abc")

    def data_hash(train: list[str], eval: list[str]) -> str:
        return tokenize(config(*train, eval_dataset=eval), 8).metadata.data_sha256

    hashes = {
        data_hash([a], [b]),
        data_hash([a], [c]),
        data_hash([a], [b, c]),
        data_hash([a, b], [c]),
        data_hash([b], [a]),
        data_hash([a, b, c], []),
    }
    assert len(hashes) == 6
    assert "from the cache" not in capsys.readouterr().out


def test_new_content_of_an_eval_file_makes_new_rows(tmp_path, capsys):
    train = write_dataset(tmp_path / "t.jsonl", [text_record("t")])
    eval = write_dataset(tmp_path / "e.jsonl", [text_record("e")])
    data = config(train, eval_dataset=[eval])
    before = tokenize(data, 8).metadata.data_sha256
    assert f"eval      the eval data are {eval}\n" in capsys.readouterr().out

    write_dataset(tmp_path / "e.jsonl", [text_record("e"), text_record("another")])
    assert tokenize(data, 8).metadata.data_sha256 != before
    assert "from the cache" not in capsys.readouterr().out


def test_short_names_have_no_folders_and_suffixes():
    names = ["teknium/OpenHermes-2.5", "data/easy.v2.jsonl.gz", "builtin:python-docs"]
    assert short_names(names) == ["OpenHermes-2.5", "easy.v2", "builtin:python-docs"]


# --- runs


@pytest.fixture
def _fresh_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_state")
def test_a_run_logs_a_loss_of_each_eval_file(tmp_path, text_file):
    old = write_dataset(tmp_path / "old.jsonl", [text_record("old")] * 20)
    new = write_dataset(tmp_path / "new.jsonl", [text_record("new")] * 20)
    run = tmp_path / "run"
    flags = f"--dataset {text_file} --output_dir {run} --eval_dataset {old} {new}".split()
    main = runpy.run_path(str(ROOT / GPT))["main"]

    main([*TINY, *flags])
    for key in ("eval/loss", "eval/loss/old", "eval/loss/new"):
        assert list(series(run, key)) == [0, 6]


# --- errors


@pytest.mark.parametrize(
    ("task", "records"),
    [
        ("text", []),
        ("text", [{"text": ""}]),
        ("chats", [{"prompt": "a", "completion": "b" * 500}]),
        ("chats", [{"prompt": "a", "completion": ""}]),
        ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "b"}]),
    ],
)
def test_eval_data_without_a_usable_record_are_an_error(tmp_path, cache, task, records):
    record = TASKS[task][1]
    settings = {} if task == "text" else {"on_bad_row": "skip"}
    train = write_dataset(tmp_path / "t.jsonl", [record(str(i)) for i in range(9)])
    eval = write_dataset(tmp_path / "e.jsonl", records)
    message = complaint(config(train, eval_dataset=[eval]), BLOCK, chat_config(task, **settings))
    assert message.startswith(f"--eval_dataset {eval}")
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"eval_dataset": ["./absent.jsonl"]}, "--eval_dataset ./absent.jsonl: "),
        ({"dataset_test_split": "test"}, "--dataset_test_split test: "),
        ({"dataset_train_split": "train_sft"}, "--dataset_train_split train_sft: "),
        (
            {"eval_dataset": ["builtin:python-docs"], "dataset_test_split": "test"},
            "--dataset_test_split test: builtin:python-docs ",
        ),
    ],
)
def test_a_wrong_name_of_eval_data_is_an_error_that_names_the_flag(
    tmp_path, cache, settings, error
):
    train = write_dataset(tmp_path / "t.jsonl", [text_record("t")])
    assert complaint(config(train, **settings), BLOCK).startswith(error)
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("eval_dataset", [""]), ("dataset_test_split", ""), ("dataset_train_split", "")],
)
def test_an_empty_name_is_an_error(name, value):
    with pytest.raises(UserError, match=f"--{name} is empty"):
        DataConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("eval_dataset", ["e.jsonl"]), ("dataset_test_split", "test")]
)
def test_eval_fraction_and_eval_data_together_are_an_error(name, value):
    data = DataConfig(tokenizer="byte", **{name: value})
    data.origins = {"eval_fraction": "command line"}
    message = complaint(data, BLOCK)
    assert message.startswith("--eval_fraction ")
    assert f"--{name} " in message


# --- records of a recipe


def test_records_of_a_recipe_can_be_evaluated_on_files(tmp_path):
    names = [f"train{i:02}" for i in range(9)]
    records = datasets.Dataset.from_list([completion_record(name) for name in names])
    eval = write_dataset(tmp_path / "e.jsonl", [completion_record("eval")])
    data = DataConfig(tokenizer="byte", eval_dataset=[eval])

    tokenized = tokenize(data, BLOCK, ChatConfig(), records=records)
    train = shown(tokenized.train, tokenized)
    assert all(name in train for name in names)
    assert "eval" in shown(tokenized.eval, tokenized)
    assert tokenized.metadata.records == 10
    assert tokenized.metadata.eval_records == 1


@pytest.mark.parametrize(
    "settings",
    [{"dataset": ["a.txt"]}, {"dataset_train_split": "a"}, {"dataset_test_split": "test"}],
)
def test_a_recipe_with_its_own_records_accepts_no_flag_for_others(settings):
    data = DataConfig(tokenizer="byte", **settings)
    (name,) = settings
    data.origins = {name: "command line"}
    assert complaint(data, BLOCK, records=["a text"]).startswith(f"--{name}: ")
