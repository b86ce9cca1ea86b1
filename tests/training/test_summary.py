"""The last lines of a finished run."""

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


def bytewise() -> PreTrainedTokenizerFast:
    """Return a tokenizer without special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Finished(NamedTuple):
    """What is left of a finished run."""

    folder: Path
    rows: Tokenized
    model: GPT


def finished(folder: Path, tokenizer: PreTrainedTokenizerFast | None) -> Finished:
    """Write what the summary reads of a run folder."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, dropout=0.5), 256, seed=0)
    files: ModelFiles = model.files(tokenizer, "some text")
    write_model(folder / "model", files, model.state_dict())
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    rows = Tokenized.of(Dataset.from_dict({"input_ids": [[65, 66, 67]]}), tokenizer)
    return Finished(folder=folder, rows=rows, model=model)


def test_a_tokenizer_without_special_tokens_shows_a_sample_of_the_model_that_is_there(
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = finished(tmp_path, bytewise())
    model = run.model.train()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # nothing is loaded
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    text = final_sample(engine_of(accelerator, model), run.rows, tmp_path / "model")
    assert text
    assert modes
    assert not any(modes), "dropout is on"
    assert model.training

    show_result(tmp_path, run.rows, text)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"--- a sample of {tmp_path / 'model'} " in shown.out
    assert f"\n{text}\n" in shown.out
    how = "transformers: AutoModelForCausalLM.from_pretrained"
    assert f"model     {tmp_path / 'model'}  ({how})\n" in shown.out
    assert "llmtrain generate" in shown.out


def test_stock_transformers_loads_the_finished_folder(tmp_path: Path) -> None:
    run = finished(tmp_path, bytewise())
    ids = torch.tensor([[65, 66, 67]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, run.model.eval()(ids).float())


def test_a_model_that_fails_to_write_a_sample_does_not_fail_the_run(
    accelerator: Accelerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path, bytewise())

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    run.model.register_forward_pre_hook(fail)
    text = final_sample(engine_of(accelerator, run.model), run.rows, tmp_path / "model")
    assert text is None
    assert "its model wrote no sample: no kernel" in capsys.readouterr().err

    show_result(tmp_path, run.rows, text)
    assert "--- a sample" not in capsys.readouterr().out


def test_the_other_ranks_wait_for_the_sample_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that left the loop would send no heartbeats, and rank 0 would end the run."""
    answers = [True, "a text"]  # whether the model writes text, and the sample
    team = SimpleNamespace(on_main=lambda _: answers.pop(0))
    monkeypatch.setattr(summary.Team, "everyone", lambda: team)
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(is_main=False, is_sharded=False))
    run = finished(tmp_path, bytewise())
    assert final_sample(engine, run.rows, tmp_path / "model") == "a text"
    assert answers == []


def test_a_language_model_without_a_tokenizer_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path, None)
    show_result(tmp_path, run.rows, "")
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "sample" not in shown.out
    how = "transformers: AutoModelForCausalLM.from_pretrained"
    assert shown.out.splitlines()[-1] == f"model     {tmp_path / 'model'}  ({how})"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "AutoTokenizer" not in card
    assert "vocabulary" not in card
    with pytest.raises(UserError, match="holds no tokenizer, so it cannot write text"):
        TextModel(str(tmp_path / "model"))
