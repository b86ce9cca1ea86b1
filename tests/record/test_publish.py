"""The finished model on the hub: in a private repository, and a note where that does not work."""

from pathlib import Path

import huggingface_hub
import pytest

from llmtrain.record.publish import publish


class Hub:
    """A hub that keeps what was asked of it, and may refuse."""

    def __init__(self, calls: list[tuple[str, dict]], refusal: Exception | None = None) -> None:
        self.calls, self.refusal = calls, refusal

    def create_repo(self, repository: str, **settings) -> None:
        self.calls.append((f"create {repository}", settings))
        if self.refusal:
            raise self.refusal

    def upload_folder(self, **settings) -> None:
        self.calls.append(("upload", settings))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    made: list[tuple[str, dict]] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(made))
    return made


def test_a_model_is_uploaded_to_a_private_repository(calls, tmp_path: Path, capsys):
    publish(tmp_path, "someone/model")
    assert calls[0] == ("create someone/model", {"private": True, "exist_ok": True})
    assert calls[1][1]["folder_path"] == tmp_path
    assert f"{tmp_path} to someone/model" in capsys.readouterr().out


def test_nothing_is_uploaded_unless_asked_for(calls, tmp_path: Path):
    publish(tmp_path, None)
    assert not calls


@pytest.mark.parametrize(
    "refusal",
    [OSError("no network\nand an essay"), ValueError("401: token hf_Abcdefghijklmnopqrst")],
)
def test_a_hub_that_refuses_leaves_a_note_without_secrets(
    monkeypatch, tmp_path: Path, capsys, refusal: Exception
):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub([], refusal))
    publish(tmp_path, "someone/model")
    error = capsys.readouterr().err
    assert error.startswith("note: uploading to someone/model failed: ")
    assert f"hf upload someone/model {tmp_path}" in error
    assert error.count("\n") == 1
    assert "hf_Abc" not in error
    assert "essay" not in error
