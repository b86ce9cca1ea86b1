"""What `llmtrain verify` demands of the runs it compares. The runs themselves are in tests/system/test_verify.py."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.commands import verify
from llmtrain.commands.trial import RequestedLayout
from llmtrain.errors import UserError


@pytest.mark.parametrize(
    ("device", "bitwise", "demanded"),
    [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)],
)
def test_bits_are_demanded_if_steps_repeat_to_the_last_bit(
    device: str, bitwise: bool, demanded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = [{"step": 0, "device": device}, {"step": 5, "device": device}]
    demands: list[bool] = []

    def compare(other: Any, same_bits: bool) -> str:
        demands.append(same_bits)
        return "compared"

    outcome = SimpleNamespace(has=lambda name: bitwise, record={"starts": starts}, compare=compare)
    trial = SimpleNamespace(
        steps=20,
        layouts=[RequestedLayout(1)],
        run=lambda *_, **__: outcome,
        run_and_kill=lambda *_: 5,
    )
    monkeypatch.setattr(verify, "Trial", lambda *_, **__: trial)
    result = verify._verify_resume(Namespace(steps=20), tmp_path)
    assert demands == [demanded]
    assert any("bits are not compared" in line for line in result.history) != demanded


@pytest.mark.parametrize("steps", [0, -1])
@pytest.mark.parametrize("verified", [verify._verify_layouts, verify._verify_resume])
def test_a_number_of_steps_that_makes_no_run_is_refused(
    verified: Callable, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(arguments: Namespace, steps: int, save_steps: int) -> None:
        raise AssertionError(f"runs of {steps} steps were started")

    monkeypatch.setattr(verify, "Trial", start)
    with pytest.raises(UserError, match=f"--steps {steps}"):
        verified(Namespace(steps=steps), tmp_path)
