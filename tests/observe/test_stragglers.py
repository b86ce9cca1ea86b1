"""The rank that keeps the other ranks waiting is named."""

import pytest

from llmtrain.observe.stragglers import Stragglers, find_straggler
from llmtrain.phase_names import OWN_PHASES, PHASES


def seconds_by_phase(ranks: int, **phases: list[float]) -> dict[str, list[float]]:
    """Return the seconds of each rank by phase.

    Args:
        ranks: the number of ranks.
        phases: seconds of each rank. Other phases take a second if a rank works in them alone, and
            no time if ranks wait for each other.
    """
    seconds = {}
    for phase in PHASES:
        usual = 1.0 if phase in OWN_PHASES else 0.0
        seconds[phase] = phases.get(phase, [usual] * ranks)
    return seconds


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("phase", OWN_PHASES)
def test_a_rank_that_takes_longer_is_named_with_its_phase(rank: int, phase: str) -> None:
    seconds = [1.0] * 4
    seconds[rank] = 4.0
    waiting = [3.0] * 4
    waiting[rank] = 0.0

    straggler = find_straggler(seconds_by_phase(4, **{phase: seconds, "exchange": waiting}))

    assert straggler is not None
    assert straggler.rank == rank
    assert straggler.phase == phase
    assert straggler.seconds == 3.0
    seconds_of_step = len(OWN_PHASES) + 3.0
    assert straggler.share == 3.0 / seconds_of_step
    assert str(straggler).startswith(
        f"rank {rank} takes 3000.0 ms longer per step than the others, most of it in "
        f"{PHASES[phase]}"
    )


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(seconds_by_phase(2, exchange=[5.0, 0.0]), id="it waits for another rank"),
        pytest.param(seconds_by_phase(2, data=[1.0, 2.0]), id="less than a fifth of the step"),
        pytest.param(seconds_by_phase(1, data=[9.0]), id="there is no other rank"),
    ],
)
def test_no_rank_is_named_if_none_waits_long_for_it(seconds: dict[str, list[float]]) -> None:
    assert find_straggler(seconds) is None


def test_a_rank_is_named_once_after_two_log_entries_in_a_row() -> None:
    late_rank_0 = seconds_by_phase(2, data=[9.0, 0.0])
    late_rank_1 = seconds_by_phase(2, data=[0.0, 9.0])
    stragglers = Stragglers()

    assert stragglers.find_new(late_rank_0) is None, "once may be chance"
    is_named = [stragglers.find_new(late_rank_1) is not None for _ in range(4)]

    assert is_named == [False, True, False, False]
