"""What a verification of resumed runs may demand."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.commands import verify
from llmtrain.commands._trial import Asked


@pytest.mark.parametrize(
    ("device", "bitwise", "demanded"),
    [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)],
)
def test_bits_are_demanded_where_updates_repeat(
    device: str, bitwise: bool, demanded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = [{"step": 0, "device": device}, {"step": 5, "device": device}]
    asked: list[bool] = []

    def compare(other: Any, same_bits: bool) -> str:
        asked.append(same_bits)
        return "compared"

    outcome = SimpleNamespace(has=lambda name: bitwise, record={"starts": starts}, compare=compare)
    trial = SimpleNamespace(
        layouts=[Asked(1)], run=lambda *_, **__: outcome, run_and_kill=lambda *_: 5
    )
    monkeypatch.setattr(verify, "Trial", lambda *_: trial)
    found = verify._resume(Namespace(steps=20), tmp_path)
    assert asked == [demanded]
    assert any("bits are not compared" in line for line in found.history) != demanded
