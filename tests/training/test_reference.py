"""The reference column has the log-probabilities of each answer under the initial weights.

It is cached on disk, verified, and computed again if it is damaged.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import llmtrain as lt
from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.shards import Column
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.model import ModelBundle
from llmtrain.models.adapters import merged_model
from llmtrain.models.config import ModelConfig
from llmtrain.models.preference import PreferenceConfig
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import ranks_of
from llmtrain.record.saver import write_model
from llmtrain.training import reference
from llmtrain.training.reference import with_reference
from llmtrain.training.rows import tokenize
from tests.launching import write_pairs

CHUNK_ROWS = 64  # rows that are cached together
PASS_ROWS = 4  # rows of a forward pass
PASSES_PER_CHUNK = CHUNK_ROWS // PASS_ROWS
SMALL_LLAMA = ModelConfig(
    from_config="llama",
    config_overrides="hidden_size=32,num_hidden_layers=1,intermediate_size=32,head_dim=8",
    max_length=64,
)


class Columns(NamedTuple):
    """The reference columns of the training rows and of the eval rows."""

    train: np.ndarray
    eval: np.ndarray


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Tokenized:
    """Preference pairs, whose training rows are two full chunks and a part of a third one."""
    path = write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 400)
    config = DataConfig(dataset=[str(path)], tokenizer="byte", eval_fraction=0.1)
    rows = tokenize(config, 64, PairConfig())
    assert 2 * CHUNK_ROWS < len(rows.train) < 3 * CHUNK_ROWS
    return rows


def passes_for(row_count: int) -> int:
    """Return the number of forward passes for some rows. The last pass is padded."""
    return math.ceil(row_count / PASS_ROWS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cached columns, which does not exist at first."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path))
    return tmp_path / "references"


class ReferenceRun:
    """Makes models with their initial weights, and adds reference columns to rows.

    Attributes:
        passes: the number of forward passes since the last column was requested.
    """

    def __init__(self, accelerator: Accelerator, rows: Tokenized) -> None:
        self.ranks = ranks_of(accelerator)
        self.rows = rows
        self.passes = 0

    def bundle(self, loss: str = "sigmoid", seed: int = 0) -> ModelBundle:
        preference = PreferenceConfig(loss_type=[loss])
        bundle = load_model(
            SMALL_LLAMA, lora=None, rows=self.rows, seed=seed, precision="no", preference=preference
        )
        return move_to_devices(self.ranks, bundle)

    def add_reference(
        self, bundle: ModelBundle, seed: int = 0, most_passes: int | None = None
    ) -> Tokenized:
        """Return the rows with a reference column.

        Args:
            bundle: the model.
            seed: the seed of its weights.
            most_passes: interrupt the program in the forward pass after these.
        """
        self.passes = 0

        def count_pass(*_: object) -> None:
            self.passes += 1
            if most_passes is not None and self.passes > most_passes:
                raise KeyboardInterrupt

        hook = bundle.model.register_forward_pre_hook(count_pass)
        try:
            return with_reference(self.ranks, seed, self.rows, bundle)
        finally:
            hook.remove()

    def columns(self, seed: int = 0, source: str = "") -> Columns:
        """Return the reference columns of the model with this seed.

        Args:
            seed: the seed of the weights.
            source: identifies the reference model, if it is not the trained one.
        """
        bundle = self.bundle(seed=seed)
        bundle.objective.reference_source = source
        rows = self.add_reference(bundle, seed)
        return Columns(train=reference_of(rows.train), eval=reference_of(rows.eval))


def reference_of(rows: Any) -> np.ndarray:
    return rows.column("reference")


@pytest.fixture
def run(accelerator: Accelerator, rows: Tokenized, cache: Path) -> ReferenceRun:
    return ReferenceRun(accelerator, rows)


# --- the numbers


def test_the_numbers_of_a_row_are_those_of_a_pass_with_this_row_only(
    run: ReferenceRun, rows: Tokenized
) -> None:
    bundle = run.bundle()
    columns = run.columns()

    for split, column in ((rows.train, columns.train), (rows.eval, columns.eval)):
        assert len(column) == len(split)
        for row, log_probabilities in zip(split, column, strict=True):
            answers = {code for code in row["answers"] if code >= 0}
            assert np.count_nonzero(log_probabilities < 0) == len(answers)
            assert np.count_nonzero(log_probabilities) == len(answers)
        for index in (0, len(split) // 2, len(split) - 1):
            batch = {name: torch.tensor([values]) for name, values in split[index].items()}
            batch |= bundle.prepare_batch(batch)
            with torch.no_grad():
                (expected,) = bundle.model(**batch, compute=bundle.objective.reference)
            np.testing.assert_allclose(column[index], expected.numpy(), rtol=1e-5)


def test_numbers_that_are_not_finite_are_an_error_and_are_not_cached(
    run: ReferenceRun, cache: Path
) -> None:
    bundle = run.bundle()
    with torch.no_grad():
        next(bundle.model.parameters()).fill_(float("nan"))

    with pytest.raises(UserError, match="not finite"):
        run.add_reference(bundle)

    assert not cache.exists()


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_a_loss_without_a_reference_computes_nothing(
    loss: str, run: ReferenceRun, rows: Tokenized, cache: Path
) -> None:
    assert run.add_reference(run.bundle(loss)) is rows
    assert run.passes == 0
    assert not cache.exists()


# --- the cache


def test_a_second_start_reads_the_column_from_the_cache(
    run: ReferenceRun, rows: Tokenized, capsys: pytest.CaptureFixture
) -> None:
    first = run.columns()
    assert run.passes == passes_for(len(rows.train)) + passes_for(len(rows.eval))

    capsys.readouterr()
    second = run.columns()

    assert run.passes == 0
    np.testing.assert_array_equal(second.train, first.train)
    np.testing.assert_array_equal(second.eval, first.eval)
    message = f"train: {len(rows.train)} rows from the cache, 0 to compute"
    assert message in capsys.readouterr().out


class ObjectiveOfUser(PreferenceObjective):
    """An objective of the user, whose reference may depend on its fields."""

    field = 1


def test_each_reference_model_and_each_content_has_its_own_column(
    run: ReferenceRun, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes_with(source: str = "", dtype: torch.dtype = torch.float32, field: int = 1) -> int:
        bundle = run.bundle()
        bundle.model.to(dtype)  # the base of an adapter may be in bfloat16
        bundle.objective.reference_source = source
        bundle.objective.__class__ = ObjectiveOfUser
        bundle.objective.field = field
        run.add_reference(bundle)
        return run.passes

    assert passes_with() > 0
    assert passes_with(source="a teacher") > 0
    assert passes_with(dtype=torch.bfloat16) > 0
    assert passes_with(field=2) > 0
    metadata = run.rows.metadata
    run.rows = replace(run.rows, metadata=replace(metadata, data_sha256="another"))
    assert passes_with() > 0
    assert len([*cache.iterdir()]) == 5

    run.rows = replace(run.rows, metadata=metadata)
    assert passes_with() == passes_with(source="a teacher") == passes_with(field=2) == 0

    monkeypatch.setattr(reference, "code_sha256", lambda: "that of a changed recipe")
    assert passes_with() > 0


def test_weights_without_a_name_are_told_apart_by_their_values(run: ReferenceRun) -> None:
    """Those of a module that a recipe has made, with the same seed."""
    bundle = replace(run.bundle(), start=None)
    first = reference_of(run.add_reference(bundle).train)
    assert np.array_equal(reference_of(run.add_reference(bundle).train), first)
    assert run.passes == 0

    with torch.no_grad():
        next(bundle.model.parameters()).mul_(2)
    assert not np.array_equal(reference_of(run.add_reference(bundle).train), first)


# --- damage


def test_a_damaged_chunk_is_computed_again(
    run: ReferenceRun, cache: Path, capsys: pytest.CaptureFixture
) -> None:
    before = run.columns()
    file, *_ = cache.glob("*/train/*")
    intact = file.read_bytes()
    digit = intact.index(b"1", len(intact) // 2)
    file.write_bytes(intact[:digit] + b"2" + intact[digit + 1 :])

    capsys.readouterr()
    after = run.columns()

    assert ", 64 to compute" in capsys.readouterr().out
    np.testing.assert_array_equal(after.train, before.train)
    assert file.read_bytes() == intact
    assert run.passes == PASSES_PER_CHUNK


def test_a_column_that_was_interrupted_is_continued(
    run: ReferenceRun, rows: Tokenized, cache: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.add_reference(run.bundle(), most_passes=PASSES_PER_CHUNK + 3)
    (file,) = cache.glob("*/train/*")

    continued = run.columns()

    all_passes = passes_for(len(rows.train)) + passes_for(len(rows.eval))
    assert run.passes == all_passes - PASSES_PER_CHUNK
    file.unlink()
    np.testing.assert_array_equal(run.columns().train, continued.train)


# --- adapters


@pytest.fixture
def base_model(accelerator: Accelerator, rows: Tokenized, tmp_path: Path) -> Path:
    bundle = load_model(SMALL_LLAMA, lora=None, rows=rows, seed=0, precision="no")
    bundle = move_to_devices(accelerator.ranks, bundle)
    folder = tmp_path / "base"
    write_model(folder, bundle.files, bundle.files.export_tensors(bundle.model))
    return folder


class WeightedRows(list[Any]):
    """Rows with a column of weights, as far as opening a run reads them."""

    column_names = ("input_ids", "labels", "answers", "loss_weight")

    @property
    def columns(self) -> dict[str, Column]:
        return {"input_ids": Column("int32", [len(self[0]["input_ids"])])}


def test_preferences_refuse_weights_of_tokens(
    accelerator: Accelerator, run: ReferenceRun, rows: Tokenized
) -> None:
    bundle = run.bundle()
    optimizer = torch.optim.SGD(bundle.model.parameters())
    weighted_rows = replace(rows, train=WeightedRows([rows.train[0]]))
    settings = lt.Settings(data=lt.BatchConfig())
    with (
        pytest.raises(UserError, match=r"a weight for each token \(loss_weight\), .* leave that"),
        lt.open_run(accelerator, settings, weighted_rows, bundle, optimizer),
    ):
        pass


def make_adapter(folder: Path, base_model: Path, rows: Tokenized, seed: int) -> Path:
    """Make an adapter with random weights."""
    settings = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), settings)
    torch.manual_seed(seed)
    for parameter in adapted.parameters():
        noise = torch.randn_like(parameter)
        if parameter.requires_grad:
            parameter.data.add_(noise, alpha=0.3)

    adapted.save_pretrained(folder)
    rows.tokenizer.save_pretrained(folder)
    return folder


def test_an_adapter_that_is_trained_further_is_compared_with_itself(
    run: ReferenceRun, rows: Tokenized, base_model: Path, tmp_path: Path
) -> None:
    """Its reference is that of the merged model, not of the base model or of another adapter."""

    def column_of(name: str, **settings: Any) -> np.ndarray:
        bundle = load_model(
            ModelConfig(name, max_length=64, **settings),
            lora=None,
            rows=rows,
            seed=0,
            precision="no",
            preference=PreferenceConfig(loss_type=["sigmoid"]),
        )
        placed = move_to_devices(run.ranks, bundle)
        return reference_of(with_reference(run.ranks, 0, rows, placed).train)

    of_base_model = column_of(str(base_model))
    for seed in (0, 1):
        adapter = make_adapter(tmp_path / f"adapter-{seed}", base_model, rows, seed)
        continued = column_of(str(adapter), continue_adapter=True)

        np.testing.assert_allclose(continued, column_of(merged_model(adapter)), atol=2e-4)
        assert np.abs(continued - of_base_model).max() > 1
