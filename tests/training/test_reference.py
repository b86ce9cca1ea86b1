"""The reference column: log-probabilities of each answer under the initial weights.

They are kept on disk, verified, and computed again if they are damaged.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.adapters import merged_model
from llmtrain.models.config import ModelConfig
from llmtrain.models.preference_config import PreferenceConfig
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.record.saver import write_model
from llmtrain.training.reference import with_reference
from tests.launching import write_pairs

CHUNK, TOGETHER = 64, 4  # rows that are kept together, and rows of a forward pass
SMALL = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,head_dim=8"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Tokenized:
    path = write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 400)
    made = tokenize(
        DataConfig(dataset=[str(path)], tokenizer="byte", eval_fraction=0.1), 64, PairConfig()
    )
    assert 2 * CHUNK < len(made.train) < 3 * CHUNK, "two whole chunks and a part of one"
    return made


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is kept, empty at first."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    return tmp_path / "references"


class Asking:
    """Models of one run, each with its initial weights, and how often they were asked."""

    def __init__(self, accelerator: Any, rows: Tokenized) -> None:
        self.accelerator = accelerator
        self.rows = rows
        self.asked = 0

    def bundle(self, loss: str = "sigmoid", seed: int = 0) -> ModelBundle:
        config = ModelConfig(from_config="llama", config_overrides=SMALL, max_length=64)
        preference = PreferenceConfig(loss_type=[loss])
        bundle = load_model(config, None, self.rows, seed, "no", preference=preference)
        bundle = place(self.accelerator, bundle)
        bundle.model.register_forward_pre_hook(self._count)
        return bundle

    def _count(self, *_: object) -> None:
        self.asked += 1

    def reference(
        self, seed: int = 0, at_most: int | None = None, source: str = ""
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the column of the training rows and of the eval rows; ``asked`` begins at 0."""
        bundle = self.bundle(seed=seed)
        bundle.objective.reference_source = source
        self.asked = 0
        if at_most is not None:

            def interrupt(*_: object) -> None:
                if self.asked > at_most:
                    raise KeyboardInterrupt

            bundle.model.register_forward_pre_hook(interrupt)
        rows = with_reference(Ranks(self.accelerator), seed, self.rows, bundle)
        assert rows.eval is not None
        return _reference_of(rows.train), _reference_of(rows.eval)


def _reference_of(rows: Any) -> np.ndarray:
    return np.array(rows.data.column("reference").to_pylist())


@pytest.fixture
def asking(accelerator, rows, kept) -> Asking:
    return Asking(accelerator, rows)


def test_the_numbers_are_those_of_each_row_by_itself(asking, rows) -> None:
    bundle = asking.bundle()
    train, held_out = asking.reference()
    for side, numbers in ((rows.train, train), (rows.eval, held_out)):
        assert len(numbers) == len(side)
        for number in (0, len(side) // 2, len(side) - 1):
            batch = {name: torch.tensor([column]) for name, column in side[number].items()}
            with torch.no_grad():
                expected = bundle.model(**batch, compute=bundle.objective.reference)
            np.testing.assert_allclose(numbers[number], expected[0].numpy(), rtol=1e-5)
            judged = len({code for code in side[number]["answers"] if code >= 0})
            assert np.count_nonzero(numbers[number] < 0) == judged
            assert np.count_nonzero(numbers[number]) == judged


def test_a_second_start_asks_nobody(asking, rows, capsys) -> None:
    first = asking.reference()
    assert asking.asked == sum(-(-len(side) // TOGETHER) + extra for side, extra in _padded(rows))
    capsys.readouterr()
    again = asking.reference()
    assert asking.asked == 0
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    count = len(rows.train)
    assert f"train: {count} rows from the cache, 0 to compute" in capsys.readouterr().out


def test_another_teacher_is_asked_anew(asking) -> None:
    asking.reference(source="one teacher")
    asking.reference(source="another teacher")
    assert asking.asked > 0
    asking.reference(source="one teacher")
    assert asking.asked == 0


def test_weights_in_another_dtype_are_asked_anew(asking, rows) -> None:
    asking.reference()
    bundle = asking.bundle()
    bundle.model.bfloat16()  # as the base of an adapter may be
    asking.asked = 0
    with_reference(Ranks(asking.accelerator), 0, rows, bundle)
    assert asking.asked > 0


class Tempered(PreferenceObjective):
    """An objective of the user, whose reference may depend on its fields."""

    temperature = 1.0


def test_another_field_of_a_users_objective_is_asked_anew(asking, rows) -> None:
    for temperature, is_asked in ((1.0, True), (2.0, True), (1.0, False)):
        bundle = asking.bundle()
        bundle.objective.__class__ = Tempered
        bundle.objective.temperature = temperature
        asking.asked = 0
        with_reference(Ranks(asking.accelerator), 0, rows, bundle)
        assert (asking.asked > 0) == is_asked, temperature


def _padded(rows: Tokenized) -> list[tuple[Any, int]]:
    """Sides, and the forward passes of empty places that make the last chunk like the others."""
    sides = [side for side in (rows.train, rows.eval) if side is not None]
    return [(side, (-len(side) % CHUNK) // TOGETHER) for side in sides]


def _flip(data: bytearray, rows: int) -> None:
    data[len(data) // 2] ^= 1


def _tear(data: bytearray, rows: int) -> None:
    del data[len(data) - 5 :]


def _lengthen(data: bytearray, rows: int) -> None:
    data += bytes(40)


def _swap(data: bytearray, rows: int) -> None:
    size = 32 + 4 * CHUNK * (len(data) - 3 * 32) // (4 * rows)
    data[:] = data[size : 2 * size] + data[:size] + data[2 * size :]


@pytest.mark.parametrize("damage", [_flip, _tear, _lengthen, _swap])
def test_what_is_damaged_is_computed_again_and_said(
    damage: Callable, asking, rows, kept, capsys
) -> None:
    first, _ = asking.reference()
    (path,) = kept.glob("*-train")
    whole = path.read_bytes()
    data = bytearray(whole)
    damage(data, len(rows.train))
    path.write_bytes(data)
    capsys.readouterr()
    again, _ = asking.reference()
    told = capsys.readouterr().out
    assert "; damaged entries are computed again" in told
    assert np.array_equal(first, again)
    assert path.read_bytes() == whole
    assert asking.asked < len(rows.train) / TOGETHER or damage is _swap, "what was whole is kept"


def test_what_was_interrupted_is_extended(asking, rows, kept) -> None:
    passes = CHUNK // TOGETHER
    with pytest.raises(KeyboardInterrupt):
        asking.reference(at_most=passes + 3)
    (path,) = kept.iterdir()
    begun = path.read_bytes()
    train, _ = asking.reference()
    assert (
        asking.asked
        == sum(-(-len(side) // TOGETHER) + extra for side, extra in _padded(rows)) - passes
    )
    assert path.read_bytes().startswith(begun)
    path.unlink()
    assert np.array_equal(asking.reference()[0], train), "lost, it is computed again"


def test_numbers_of_other_weights_are_not_taken_even_under_the_name_of_these(
    asking, kept, capsys
) -> None:
    first, _ = asking.reference()
    (mine,) = kept.glob("*-train")
    others, _ = asking.reference(seed=1)
    (theirs,) = set(kept.glob("*-train")) - {mine}
    assert not np.array_equal(first, others)
    mine.write_bytes(theirs.read_bytes())
    capsys.readouterr()
    assert np.array_equal(asking.reference()[0], first)
    assert ": 0 rows from the cache, " in capsys.readouterr().out


def test_numbers_that_are_not_finite_end_in_one_line_and_are_not_kept(asking, rows, kept) -> None:
    bundle = asking.bundle()
    with torch.no_grad():
        next(bundle.model.parameters())[0] = float("nan")
        next(bundle.model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        with_reference(Ranks(asking.accelerator), 0, rows, bundle)
    assert not list(kept.glob("*"))


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_a_loss_that_compares_with_nothing_asks_for_nothing(loss: str, asking, rows, kept) -> None:
    bundle = asking.bundle(loss)
    assert with_reference(Ranks(asking.accelerator), 0, rows, bundle) is rows
    assert not kept.exists()
    assert asking.asked == 0


def test_other_rows_have_other_numbers(asking, rows, kept) -> None:
    asking.reference()
    asking.rows = replace(rows, metadata=replace(rows.metadata, data_sha256="another"))
    asking.reference()
    assert asking.asked > 0
    assert len(list(kept.iterdir())) == 4


def test_an_adapter_that_goes_on_is_compared_with_itself(accelerator, rows, kept, tmp_path) -> None:
    """Its base, and a full copy of the model with the adapter merged into it, are other models."""
    config = ModelConfig(from_config="llama", config_overrides=SMALL, max_length=64)
    base_bundle = place(accelerator, load_model(config, None, rows, 0, "no"))
    base = tmp_path / "base"
    write_model(base, base_bundle.files, base_bundle.files.export_tensors(base_bundle.model))
    adapters = []
    for seed in range(2):
        settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
        torch.manual_seed(seed)
        for parameter in adapted.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3 * parameter.requires_grad)
        adapted.save_pretrained(tmp_path / f"adapter-{seed}")
        rows.tokenizer.save_pretrained(tmp_path / f"adapter-{seed}")
        adapters.append(tmp_path / f"adapter-{seed}")

    def reference(name: str, **settings: Any) -> np.ndarray:
        model = ModelConfig(name, max_length=64, **settings)
        preference = PreferenceConfig(loss_type=["sigmoid"])
        bundle = load_model(model, None, rows, 0, "no", preference=preference)
        ranks = Ranks(accelerator)
        return _reference_of(with_reference(ranks, 0, rows, place(accelerator, bundle)).train)

    of_base = reference(str(base))
    for adapter in adapters:
        own = reference(str(adapter), continue_adapter=True)
        of_copy = reference(merged_model(adapter))
        np.testing.assert_allclose(own, of_copy, atol=2e-4)
        assert np.abs(own - of_base).max() > 1
