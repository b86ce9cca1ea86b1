"""A finished run shows a sample, and how to use its model."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM

from llmtrain.data.tokenized import Tokenized
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.record.saver import write_model
from llmtrain.training.summary import final_sample, show_result
from tests.engines import engine_of
from tests.models.small_models import byte_tokenizer


class FinishedRun(NamedTuple):
    """The parts of a finished run that its summary needs."""

    folder: Path
    rows: Tokenized
    model: GPT

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    tokenizer = byte_tokenizer()
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, dropout=0.5)
    model = GPT(config, len(tokenizer), seed=0)
    write_model(tmp_path / "model", model.files(tokenizer, "some text"), model.state_dict())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    rows = Tokenized.of(Dataset.from_dict({"input_ids": [[65, 66, 67]]}), tokenizer)
    return FinishedRun(folder=tmp_path, rows=rows, model=model)


def test_the_final_sample_is_from_the_model_in_memory_without_dropout(
    run: FinishedRun, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # nothing is loaded
    model = run.model.train()
    training_modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: training_modes.append(module.training))

    text = final_sample(engine_of(accelerator, model), run.rows, run.model_folder)

    assert text
    assert training_modes
    assert not any(training_modes)
    assert model.training, "the mode of the model is restored"


def test_the_end_of_a_run_shows_the_sample_and_how_to_use_the_model(
    run: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    show_result(run.folder, run.rows, "a text")

    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\na text\n" in printed.out
    assert f"model     {run.model_folder}  (transformers: AutoModelForCausalLM" in printed.out
    assert "llmtrain generate" in printed.out


@pytest.mark.skipif(
    not Path(sys.executable).with_name("llmtrain").exists(), reason="llmtrain is not installed"
)
def test_a_command_that_is_not_on_the_path_is_printed_with_its_own(
    run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    show_result(run.folder, run.rows, "a text")
    [command] = re.findall("(?m)^generate +([^ ]+) generate ", capsys.readouterr().out)
    assert Path(command).is_file()


def test_what_a_question_or_a_sample_says_to_the_terminal_is_shown(
    run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = byte_tokenizer()("\x1b]0;title\x07")["input_ids"]
    monkeypatch.setattr("llmtrain.training.summary.eval_prompt", lambda _: question)

    show_result(run.folder, run.rows, "\x9b31m\r")

    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07" in out
    assert "\\x9b31m\\r\n" in out
    assert not {*"\x1b\x07\x9b\r"} & {*out}


def test_a_model_that_cannot_write_a_sample_does_not_fail_the_run(
    run: FinishedRun, accelerator: Accelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    run.model.register_forward_pre_hook(fail)

    text = final_sample(engine_of(accelerator, run.model), run.rows, run.model_folder)

    assert text is None
    assert "its model wrote no sample: no kernel" in capsys.readouterr().err
    show_result(run.folder, run.rows, text)
    assert "--- a sample" not in capsys.readouterr().out


def test_other_ranks_wait_for_the_sample_of_rank_0(run: FinishedRun) -> None:
    """A rank that left the loop would send no heartbeats, and rank 0 would end the run."""
    is_text_model = True
    answers_of_rank_0 = [is_text_model, "a text"]
    ranks = SimpleNamespace(
        is_main=False, is_sharded=False, on_main=lambda action: answers_of_rank_0.pop(0)
    )
    engine: Any = SimpleNamespace(ranks=ranks)

    assert final_sample(engine, run.rows, run.model_folder) == "a text"
    assert answers_of_rank_0 == []
