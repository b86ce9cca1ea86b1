"""An error of one rank is raised on all: as one line if the user can fix it."""

from collections.abc import Callable

import pytest

from llmtrain.errors import UserError
from llmtrain.parallel.ranks import THIS_RANK

CALLS = [THIS_RANK.on_main, THIS_RANK.on_all]


def action_raising(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("--seed is wrong."), "--seed is wrong."),
        (OSError(13, "Permission denied", "/a/run.json"), "/a/run.json: Permission denied"),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(error: Exception, message: str) -> None:
    for run_action in CALLS:
        with pytest.raises(UserError, match=f"^{message}.*$"):
            run_action(action_raising(error))


def test_an_error_in_the_program_is_raised_itself() -> None:
    error = ValueError("bad number")
    with pytest.raises(ValueError, match="bad number") as raised:
        THIS_RANK.on_all(action_raising(error))

    assert raised.value is error
