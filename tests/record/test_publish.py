"""The finished model is uploaded to the hub, or a note says why not."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from peft import LoraConfig

from llmtrain.record.publish import publish
from tests.command_line import run_cli


class FakeHub:
    """Stands for `HfApi`: keeps the calls, and refuses to create a repository if told to."""

    def __init__(self) -> None:
        self.created: dict[str, dict[str, Any]] = {}
        self.uploads: list[dict[str, Any]] = []
        self.refusal: Exception | None = None

    def create_repo(self, repository: str, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.created[repository] = options

    def upload_folder(self, **options: Any) -> None:
        assert options["repo_id"] in self.created
        self.uploads.append(options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def test_a_model_is_uploaded_to_a_private_repository(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    publish(tmp_path, "someone/model")

    assert hub.created == {"someone/model": {"private": True, "exist_ok": True}}
    (upload,) = hub.uploads
    assert upload["repo_id"] == "someone/model"
    assert upload["folder_path"] == tmp_path
    assert f"{tmp_path} to someone/model" in capsys.readouterr().out


def test_nothing_is_uploaded_without_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    publish(tmp_path, None)

    assert hub.created == {}
    assert hub.uploads == []


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(OSError("no network\nand an essay"), id="message of two lines"),
        pytest.param(ValueError("401: token hf_Abcdefghijklmnopqrst"), id="message with a token"),
    ],
)
def test_a_refusal_of_the_hub_is_a_note_of_one_line_without_secrets(
    refusal: Exception, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    hub.refusal = refusal

    publish(tmp_path, "someone/model")

    note = capsys.readouterr().err
    assert note.startswith("note: uploading to someone/model failed: ")
    assert f"hf upload someone/model {tmp_path}" in note
    assert note.count("\n") == 1
    assert "hf_Abc" not in note
    assert "essay" not in note


def test_an_adapter_of_a_local_base_is_noted_before_it_is_published(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """`peft` writes such settings. Nobody else has the base under this path."""
    base = tmp_path / "base"
    adapter = tmp_path / "run" / "model"
    LoraConfig(base_model_name_or_path=str(base)).save_pretrained(str(adapter))

    publish(adapter, None)
    run_note = capsys.readouterr().err
    _, export_out, _ = run_cli(
        capsys, "export", str(tmp_path / "run"), "--to", str(tmp_path / "to")
    )

    for text, folder in ((run_note, adapter), (export_out, tmp_path / "to")):
        assert f"note: {folder}/adapter_config.json names its base by a path" in text
        assert str(base) in text
        assert "set base_model_name_or_path" in text

    LoraConfig(base_model_name_or_path="org/base").save_pretrained(str(adapter))
    publish(adapter, "someone/adapter")
    assert capsys.readouterr().err == ""
