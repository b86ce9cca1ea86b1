"""An error of one rank is raised on all, and ranks that would train different things stop."""

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
from tests.record.two_ranks import TwoRanks


def action_raising(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


# --- errors


@pytest.mark.parametrize(
    "run_action",
    [
        pytest.param(THIS_RANK.on_main, id="on_main"),
        pytest.param(THIS_RANK.on_all, id="on_all"),
        pytest.param(Team.everyone().on_main, id="on_main of everyone"),
    ],
)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(UserError("--seed is wrong."), "--seed is wrong.", id="UserError"),
        pytest.param(
            OSError(28, "No space left on device"),
            "No space left on device; free some space, or use another folder; what was saved before "
            "is intact.",
            id="OSError",
        ),
        pytest.param(
            OSError(13, "Permission denied", "/a/run.json"),
            "/a/run.json: Permission denied; use a file or folder that this user may access.",
            id="OSError with a path",
        ),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(
    run_action: Callable, error: Exception, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        run_action(action_raising(error))

    assert str(raised.value) == message


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), ValueError("bad number"), RuntimeError("shape")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_the_program_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        THIS_RANK.on_all(action_raising(error))

    assert raised.value is error
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "action" in functions


# --- descriptions of what ranks are about to train


def describe(*, seed: int = 0, dataset: str = "here", data: str = "abc") -> dict[str, Any]:
    settings = {
        "seed": {"value": seed, "from": "recipe"},
        "dataset": {"value": dataset, "from": "command line"},
    }
    return run_description(fingerprint={"data": data}, settings=settings, precision="no")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(
            describe(seed=1),
            "rank 1 differs from rank 0 in flags: seed 1 there, 0 here.",
            id="flags",
        ),
        pytest.param(
            describe(data="xyz"),
            "rank 1 differs from rank 0 in data: xyz there, abc here.",
            id="data",
        ),
        pytest.param(
            describe() | {"versions": {}},
            "rank 1 differs from rank 0 in versions: ",
            id="versions",
        ),
    ],
)
def test_ranks_that_would_train_different_things_stop_with_both_values(
    other: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_ranks_agree(TwoRanks(other), describe())

    assert str(raised.value).startswith(message)


def test_ranks_may_have_their_data_in_different_places() -> None:
    other = describe(dataset="there")

    check_ranks_agree(TwoRanks(other), describe(dataset="here"))


def test_the_resume_point_can_be_sent_to_other_ranks(tmp_path: Path) -> None:
    with choose_folder(str(tmp_path / "run"), "auto", {"data": "abc"}) as resume_point:
        pass

    assert pickle.loads(pickle.dumps(resume_point)) == resume_point
    assert resume_point.folder == tmp_path / "run"
    assert resume_point.checkpoint is None
    assert resume_point.reason == "new"
    assert len(resume_point.run_id) == 8
    assert len(resume_point.start_id) == 16
