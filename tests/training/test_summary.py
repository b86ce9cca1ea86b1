"""The last lines of a finished run."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.generation import TextModel
from llmtrain.models.gpt import GPT
from llmtrain.parallel.distributed_tensors import DistributedTensors
from llmtrain.record.saver import write_model
from llmtrain.training.summary import show_result


def bytewise() -> PreTrainedTokenizerFast:
    """Return a tokenizer without special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def finished(folder: Path, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """Write what the summary reads of a run folder."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16), 256, seed=0)
    files: ModelFiles = model.files(tokenizer, "some text")
    write_model(folder / "model", files, DistributedTensors(model.state_dict()))
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    return folder


def test_a_tokenizer_without_special_tokens_shows_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_result(finished(tmp_path, bytewise()), question=None, opening=[65])
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "--- a sample of" in shown.out
    how = "transformers: AutoModelForCausalLM.from_pretrained"
    assert f"model     {tmp_path / 'model'}  ({how})\n" in shown.out
    assert "llmtrain generate" in shown.out


def test_a_language_model_without_a_tokenizer_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_result(finished(tmp_path, None), question=None, opening=[65])
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
