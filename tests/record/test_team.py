"""Errors of one rank become everyone's, and ranks that are about to train different things stop."""

import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.parallel.team import THIS_RANK, Team
from llmtrain.record.resume import choose_folder
from llmtrain.record.run_description import check_ranks_agree, run_description


def failing(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("together", [THIS_RANK.on_main, THIS_RANK.on_all, Team.everyone().on_main])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UserError("--seed is wrong."), "--seed is wrong."),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device."),
        (
            OSError(13, "Permission denied", "/a/run.json"),
            "[Errno 13] Permission denied: '/a/run.json'.",
        ),
    ],
)
def test_an_error_that_a_person_can_mend_is_one_line(
    together: Callable, error: Exception, says: str
) -> None:
    with pytest.raises(UserError) as raised:
        together(failing(error))
    assert str(raised.value) == says


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("bad number"), RuntimeError("shape")])
def test_a_mistake_in_the_program_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        THIS_RANK.on_all(failing(error))
    assert raised.value is error
    assert "action" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Two(Team):
    """Rank 0 and another, which answers with ``other``."""

    other: Any = None

    def on_all(self, action: Callable[[], Any]) -> list[Any]:
        return [action(), self.other]


def runs(seed: int, dataset: str, data: str = "abc") -> dict[str, Any]:
    settings = {
        "seed": {"value": seed, "from": "recipe"},
        "dataset": {"value": dataset, "from": "command line"},
    }
    return run_description({"data": data}, settings, "no")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (runs(1, "here"), "rank 1 differs from rank 0 in flags: seed 1 there, 0 here."),
        (runs(0, "here", "xyz"), "rank 1 differs from rank 0 in data: xyz there, abc here."),
        ({**runs(0, "here"), "versions": {}}, "rank 1 differs from rank 0 in versions: "),
    ],
)
def test_ranks_that_would_train_something_else_stop_with_both_values(
    other: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Two, "other", other)
    with pytest.raises(UserError) as raised:
        check_ranks_agree(Two(), runs(0, "here"))
    assert str(raised.value).startswith(says)


def test_ranks_may_find_their_data_at_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Two, "other", runs(0, "there"))
    check_ranks_agree(Two(), runs(0, "here"))


def test_a_choice_can_be_sent_to_other_ranks(tmp_path: Path) -> None:
    with choose_folder(str(tmp_path / "run"), "auto", {"data": "abc"}) as choice:
        pass
    assert pickle.loads(pickle.dumps(choice)) == choice
    assert (choice.folder, choice.checkpoint, choice.reason) == (tmp_path / "run", None, "new")
    assert (len(choice.run_id), len(choice.start_id)) == (8, 16)
