"""Multimodal checkpoints trained on text as whole runs, on one process and on two."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, long_form, series, torchrun, write_chats
from tests.multimodal import CLASSES, write_checkpoint

SETTINGS = ["--max_steps", "2", "--logging_steps", "1", "--global_batch_size", "4"]
SETTINGS += ["--max_length", "64", "--learning_rate", "1e-2", "--report_to", "none"]
ADAPTER = ["--lora_r", "2"]

# The line about what is frozen or left out, or the error.
LINES = {
    "Gemma3": "frozen    37,152 parameters outside the text tower: model.vision_tower, ",
    "Qwen3_5": "left out  model.visual: Qwen3_5ForCausalLM does not have these 67,424 parameters",
    "Mistral3": "error: --model_name_or_path {folder}: transformers has no causal LM for mistral3",
    "Qwen3VL": "error: --model_name_or_path {folder}: transformers has no causal LM for qwen3_vl",
}
REFUSED = ["Mistral3", "Qwen3VL"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(name: str) -> Path:
        if not (folder / name).exists():
            write_checkpoint(name, folder / name)
        return folder / name

    return checkpoint


def check_run(launcher: list[str], flags: list[str], name: str, base: Path, run: Path) -> None:
    """Check that a class is trained, or refused, with the one line that says what is left out."""
    command = [*launcher, FINETUNE, "--model_name_or_path", str(base), "--output_dir", str(run)]
    ended = run_forked([*command, *SETTINGS, *flags])
    said = ended.out + ended.err
    line = LINES[name].format(folder=base)
    assert said.count(line) == 1, said
    assert said.count("error: ") == (name in REFUSED), said
    if name in REFUSED:
        assert ended.status == 2
        assert "audit" not in said, "refused before the data are prepared"
        return

    ended.assert_ok()
    losses = series(run, "train/loss")
    assert losses[2] < losses[1]


def test_a_multimodal_model_is_trained_on_text_by_two_processes(
    checkpoint: Callable[[str], Path], chats: Path, tmp_path: Path
) -> None:
    base = checkpoint("Gemma3")
    check_run(torchrun(2), ["--dataset", str(chats)], "Gemma3", base, tmp_path / "run")


@long_form
@pytest.mark.parametrize("flags", [[], ADAPTER], ids=["full", "adapter"])
@pytest.mark.parametrize("launcher", [PYTHON, torchrun(2)], ids=["one", "two"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_multimodal_class_is_trained_on_text_or_refused_in_one_line(
    name: str,
    launcher: list[str],
    flags: list[str],
    checkpoint: Callable[[str], Path],
    chats: Path,
    tmp_path: Path,
) -> None:
    data = ["--dataset", str(chats)]
    check_run(launcher, [*flags, *data], name, checkpoint(name), tmp_path / "run")
