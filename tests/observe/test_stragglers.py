"""Who keeps the others waiting, and when that process is named."""

import pytest

from llmtrain.observe.stragglers import Stragglers, find_straggler
from llmtrain.phase_names import OWN_PHASES, PHASES


def test_a_process_is_named_once_when_it_is_late_in_two_log_entries_in_a_row() -> None:
    stragglers = Stragglers()
    late, other = readings([1.0, 1.0], data=[0.0, 9.0]), readings([1.0, 1.0], data=[9.0, 0.0])
    assert stragglers.find_new(other) is None, "once may be chance"
    named = [stragglers.find_new(late) for _ in range(4)]
    assert [found is not None for found in named] == [False, True, False, False]


def readings(each: list[float], **other: list[float]) -> dict[str, list[float]]:
    """Every rank takes ``each`` in every phase of its own, and waits for nothing."""
    return {
        **{phase: each if phase in OWN_PHASES else [0.0] * len(each) for phase in PHASES},
        **other,
    }


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("phase", OWN_PHASES)
def test_a_process_that_takes_longer_is_named_with_its_phase(rank: int, phase: str) -> None:
    ranks = [1.0] * 4
    ranks[rank] = 4.0
    waiting = [3.0] * 4
    waiting[rank] = 0.0
    late = find_straggler(readings([1.0] * 4, **{phase: ranks, "exchange": waiting}))
    assert late is not None
    assert (late.rank, late.phase, late.seconds, late.share) == (rank, phase, 3.0, 3 / 8)
    assert str(late).startswith(
        f"rank {rank} takes 3000.0 ms longer per step than the others, most of it in {PHASES[phase]}"
    )


def test_who_waits_is_not_named_nor_a_small_difference_nor_one_that_is_alone() -> None:
    assert find_straggler(readings([1.0, 1.0], exchange=[5.0, 0.0])) is None
    assert find_straggler(readings([1.0, 1.0], data=[1.0, 2.0])) is None, (
        "less than a fifth of the update"
    )
    assert find_straggler(readings([1.0], data=[9.0])) is None
