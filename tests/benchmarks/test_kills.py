"""The picture of a run that is killed: the script kills, resumes, compares and draws."""

from pathlib import Path

from tests.launching import PYTHON, TINY_GPT, run


def test_a_killed_run_resumes_on_fewer_processes_and_both_losses_are_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "kills.svg"
    flags = ["--steps", "8", "--processes", "2", "1", "--picture", str(picture)]

    ended = run([*PYTHON, "-m", "benchmarks.kills", *flags, *TINY_GPT]).assert_ok()

    assert "killed on 2, resumed on 1 from step" in ended.out
    assert "rows, losses, norms and weights of 8 log entries" in ended.out
    assert ">processes of the killed run</text>" in picture.read_text()
