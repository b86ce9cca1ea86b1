"""One process of a launch reads a recipe's records for their fingerprint, and no launch takes another's."""

from collections import Counter
from pathlib import Path

import pytest

from llmtrain import once_per_machine as module
from llmtrain.data.sources import records_source
from llmtrain.once_per_machine import once_per_machine
from tests.launching import PYTHON, run, torchrun

# Two functions of one name, whose records are other ones. Each writes a line when all are read.
SCRIPT = """
import sys
import llmtrain as lt

def source(word):
    def records():
        for number in range(40):
            yield f"{word} {number}"
        sys.stdout.write(f"read {word}\\n")
    return records

for word in ("one", "two"):
    data = lt.DataConfig(tokenizer="byte", eval_fraction=0.0)
    made = lt.tokenize(data, 16, records=source(word))
    sys.stdout.write(f"rows {word} {made.metadata.data_sha256}\\n")
"""


def test_all_processes_of_a_launch_read_a_generator_as_often_as_one_process(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def lines_of(command: list[str], cache: str) -> Counter[str]:
        ended = run([*command, str(script)], {"LLMTRAIN_CACHE": f"{tmp_path}/{cache}"}).assert_ok()
        return Counter(line for line in ended.out.splitlines() if line.startswith(("read", "rows")))

    of_one = lines_of(PYTHON, "first")
    rows = [line for line in of_one if line.startswith("rows")]
    assert len(rows) == 2
    assert lines_of(torchrun(2), "second") == of_one + Counter(rows)  # of both processes


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a launch of two processes, of which this process is one."""
    folder = tmp_path / "attempt_0"
    (folder / "1").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "1" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(module, "_calls", Counter())
    return folder


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process another one of the launch, which has not asked for a result."""
    monkeypatch.setattr(module, "_calls", Counter())


def test_the_calls_with_a_name_are_told_apart_by_their_order(
    launched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert once_per_machine("a", lambda: "x") == "x"
    assert once_per_machine("a", lambda: "y") == "y"
    assert once_per_machine("b", lambda: "z") == "z"
    again(monkeypatch)
    assert [once_per_machine("a", lambda: "unused") for _ in range(2)] == ["x", "y"]
    assert once_per_machine("b", lambda: "unused") == "z"


def test_a_failure_is_no_result(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        once_per_machine("a", lambda: str(1 // 0))
    again(monkeypatch)
    assert once_per_machine("a", lambda: "x") == "x"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCHELASTIC_ERROR_FILE", ""),
        ("TORCHELASTIC_ERROR_FILE", "/somewhere/attempt_0/1/error.json"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
    ],
)
def test_a_process_whose_launch_is_not_known_computes_for_itself(
    launched: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    assert once_per_machine("a", lambda: "x") == "x"
    monkeypatch.setenv(variable, value)
    again(monkeypatch)
    assert once_per_machine("a", lambda: "y") == "y"


def test_a_name_stands_for_the_records() -> None:
    unread = lambda: 1 // 0  # noqa: E731
    first = records_source(unread, "v1").fingerprint()
    assert first == records_source(unread, "v1").fingerprint()
    assert first != records_source(unread, "v2").fingerprint()
    # Recipes share the cache, and may use the same name for other records.
    assert first != records_source(lambda: ["a"], "v1").fingerprint()
