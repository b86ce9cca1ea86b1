"""A finished run shows a sample, and how to use its model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import TextModel
from llmtrain.models.gpt import GPT
from llmtrain.record.saver import write_model
from llmtrain.training import summary
from llmtrain.training.summary import final_sample, show_result
from tests.engines import engine_of


def bytewise_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class FinishedRun(NamedTuple):
    """The parts of a finished run that its summary needs."""

    folder: Path
    rows: Tokenized
    model: GPT

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


def write_run(folder: Path, tokenizer: PreTrainedTokenizerFast | None) -> FinishedRun:
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, dropout=0.5)
    model = GPT(config, 256, seed=0)
    files: ModelFiles = model.files(tokenizer, "some text")
    write_model(folder / "model", files, model.state_dict())
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    rows = Tokenized.of(Dataset.from_dict({"input_ids": [[65, 66, 67]]}), tokenizer)
    return FinishedRun(folder=folder, rows=rows, model=model)


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    return write_run(tmp_path, bytewise_tokenizer())


TRANSFORMERS = "transformers: AutoModelForCausalLM.from_pretrained"


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
    assert f"--- a sample of {run.model_folder} " in printed.out
    assert "\na text\n" in printed.out
    assert f"model     {run.model_folder}  ({TRANSFORMERS})\n" in printed.out
    assert "llmtrain generate" in printed.out
    assert "serve     vLLM or SGLang, if it knows gpt2; llama.cpp" in printed.out


def test_what_a_question_or_a_sample_says_to_the_terminal_is_shown(
    run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = bytewise_tokenizer()("\x1b]0;title\x07")["input_ids"]
    monkeypatch.setattr(Tokenized, "eval_prompt", lambda _: question)

    show_result(run.folder, run.rows, "\x9b31m\r")

    out = capsys.readouterr().out
    assert "\\x1b]0;title\\x07\n" in out
    assert "\\x9b31m\\r\n" in out
    assert not {*"\x1b\x07\x9b\r"} & {*out}


def test_transformers_loads_the_finished_model(run: FinishedRun) -> None:
    ids = torch.tensor([[65, 66, 67]])

    loaded = AutoModelForCausalLM.from_pretrained(run.model_folder)

    with torch.no_grad():
        expected = run.model.eval()(ids).float()
        torch.testing.assert_close(loaded.eval()(ids).logits, expected)


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


def test_other_ranks_wait_for_the_sample_of_rank_0(
    run: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that left the loop would send no heartbeats, and rank 0 would end the run."""
    is_text_model = True
    answers_of_rank_0 = [is_text_model, "a text"]
    team = SimpleNamespace(on_main=lambda action: answers_of_rank_0.pop(0))
    monkeypatch.setattr(summary.Team, "everyone", lambda: team)
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(is_main=False, is_sharded=False))

    assert final_sample(engine, run.rows, run.model_folder) == "a text"
    assert answers_of_rank_0 == []


def test_a_language_model_without_a_tokenizer_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, tokenizer=None)

    show_result(run.folder, run.rows, "")

    printed = capsys.readouterr()
    assert printed.err == ""
    assert "sample" not in printed.out
    assert printed.out.splitlines()[-1] == f"model     {run.model_folder}  ({TRANSFORMERS})"
    card = (run.model_folder / "README.md").read_text()
    assert "AutoTokenizer" not in card
    assert "vocabulary" not in card
    with pytest.raises(UserError, match="holds no tokenizer, so it cannot write text"):
        TextModel(str(run.model_folder))
