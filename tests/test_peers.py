"""The claims of docs/explanation/compared.md about transformers' Trainer, in the source of the version that is tested."""

import importlib.util
import re
from pathlib import Path

import pytest
import transformers
from transformers import HfArgumentParser, TrainingArguments

from tests.launching import ROOT


def test_what_is_said_of_the_trainer_holds() -> None:
    said = re.search(
        r"transformers ([\d.]+) \(its Trainer\)",
        (ROOT / "docs" / "explanation" / "compared.md").read_text(),
    )
    assert said is not None
    assert f"transformers=={said[1]}." in (ROOT / "constraints.txt").read_text()
    if not transformers.__version__.startswith(f"{said[1]}."):
        pytest.skip(f"it says it of {said[1]}")
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    source = "".join(
        (Path(found.origin).parent / name).read_text()
        for name in ("trainer.py", "trainer_utils.py")
    )
    assert (
        "return self._train_batch_size * args.gradient_accumulation_steps * dp_world_size" in source
    )
    assert "if isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint:" in source
    assert "hashlib" not in source
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        HfArgumentParser([TrainingArguments]).parse_args_into_dataclasses(
            ["--output_dir", "x", "--n_layers", "3"]
        )
