from pathlib import Path

from tests.forked import run_forked
from tests.launching import long_form, read_json, torchrun

SCRIPT = "tests/system/collectives.py"


def test_gradients_are_reduced_once_an_update_in_the_last_micro_batch(tmp_path: Path) -> None:
    run_forked([*torchrun(2), SCRIPT, str(tmp_path / "counts.json")]).assert_ok()
    counts = read_json(tmp_path / "counts.json")
    for nothing, nothing_again, last in counts["rounds"]:
        assert (nothing, nothing_again) == (0, 0)
        assert last == counts["buckets"] >= 1


@long_form
def test_the_count_would_show_a_sync_in_every_micro_batch(tmp_path: Path) -> None:
    run_forked(
        [*torchrun(2), SCRIPT, str(tmp_path / "counts.json"), "sync_every_micro_batch"]
    ).assert_ok()
    assert all(first > 0 for first, _, _ in read_json(tmp_path / "counts.json")["rounds"])
