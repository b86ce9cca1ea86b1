"""Unpacked rows: each once per epoch, near others of its length, and trimmed of nothing but padding."""

from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from llmtrain.data import packing
from llmtrain.data.config import DataConfig
from llmtrain.data.grouping import BATCHES_PER_MEGABATCH, LengthGrouping
from llmtrain.data.loader import (
    Collate,
    RowBatch,
    SlotRows,
    count_shapes,
    eval_loader,
    row_lengths,
    train_loader,
    trimmed_width,
)
from llmtrain.data.packing import Examples, write_rows
from llmtrain.data.prepare import Tokenized
from llmtrain.data.samplers import GlobalBatchSampler, Slot, slots_of
from llmtrain.data.shuffle import Mixture, key_of, permute
from llmtrain.data.store import TokenRows, TokenStore
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.interfaces.batches import IGNORED, Batch, LocalBatch
from llmtrain.models.config import ModelConfig
from llmtrain.models.pretrained import load_model
from llmtrain.padded_sizes import padded_size
from llmtrain.parallel.placement import place
from llmtrain.training.fingerprint import run_fingerprint
from llmtrain.training.layout import Layout
from llmtrain.training.settings import Settings
from tests.models.some_rows import SomeRows

WIDTH = 65
ROWS = 230
SIZES = [(1, 1), (1, 4), (3, 8), (9, 8), (23, 4), (50, 1), (230, 4), (400, 4), (1003, 7)]
LAYOUTS = [(1, 8), (1, 3), (2, 4), (2, 1), (4, 2), (8, 1)]


def lengths_of(n: int, largest: int = WIDTH) -> np.ndarray:
    """Many short ones and a few long ones, as conversations are."""
    lengths = np.random.default_rng(n).lognormal(3.0, 0.8, n)
    return lengths.astype(np.int64).clip(2, largest)


def documents(folder: Path, packing: bool = False, chunks: int = 1) -> TokenRows:
    """Row i has a document of ``lengths_of(ROWS)[i]`` random tokens; two of three are targets."""
    draw = np.random.default_rng(0)
    paths = []
    for chunk in np.array_split(lengths_of(ROWS), chunks):
        paths.append(folder / f"documents-{len(paths)}.arrow")
        store = TokenStore(paths[-1].with_suffix(".tokens"))
        for length in chunk.tolist():
            store.add(draw.integers(1, 200, length), draw.random(length) < 2 / 3)
        examples = Examples.of_sequences(np.arange(len(store)), store.lengths)
        write_rows(paths[-1], store, examples, WIDTH, packing)
    return TokenRows.open(paths)


def pairs(folder: Path) -> TokenRows:
    """Each half of row i has an answer of its own length."""
    draw = np.random.default_rng(0)
    path = folder / "pairs.arrow"
    store = TokenStore(path.with_suffix(".tokens"))
    for first, second in zip(lengths_of(40, 32), lengths_of(41, 32)[1:], strict=True):
        ids = draw.integers(1, 200, first + second)
        for answer in (ids[:first], ids[first:]):
            store.add(answer, np.arange(len(answer)) > 0)
    stops = store.lengths.reshape(-1, 2)
    examples = Examples(
        sequences=np.arange(len(store)).reshape(-1, 2),
        starts=np.zeros_like(stops),
        stops=stops,
        is_first_desirable=np.ones(len(stops), bool),
    )
    write_rows(path, store, examples, 64, packing=False)
    return TokenRows.open([path])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return documents(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def pair_rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return pairs(tmp_path_factory.mktemp("pairs"))


# --- the order


def epoch_of(epoch: int, lengths: np.ndarray, size: int, seed: int = 0) -> list[list[int | None]]:
    """Return the rows of each step of an epoch."""
    n = len(lengths)
    grouping = LengthGrouping(lengths)
    steps = range(epoch * -(-n // size), (epoch + 1) * -(-n // size))
    return [[slot.row for slot in slots_of(k, n, size, seed, grouping=grouping)] for k in steps]


@pytest.mark.parametrize(("n", "size"), SIZES)
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_an_epoch_holds_every_row_once_and_empty_slots_only_at_its_end(n, size, seed):
    for epoch in range(3):
        drawn = list(chain(*epoch_of(epoch, lengths_of(n), size, seed)))
        assert len(drawn) % size == 0
        assert sorted(drawn[:n]) == list(range(n))
        assert drawn[n:] == [None] * (-n % size)


def in_sequence(lengths: list[int], size: int, seed: int) -> Iterator[list[int]]:
    """Yield the rows of every step, one epoch and one megabatch after the other."""
    n = len(lengths)
    for epoch in count():
        permuted = permute(np.arange(n), n, key_of(seed, epoch)).tolist()
        for megabatch, start in enumerate(range(0, n, BATCHES_PER_MEGABATCH * size)):
            waiting = permuted[start : start + BATCHES_PER_MEGABATCH * size]
            waiting.sort(key=lambda row: lengths[row])
            steps = -(-len(waiting) // size)
            order = permute(np.arange(steps), steps, key_of(seed, epoch, megabatch, steps)).tolist()

            batches = []
            for number in range(steps):
                is_short = number == order[-1] and len(waiting) % size
                taken = len(waiting) % size if is_short else size
                batches.append(waiting[:taken][:: -1 if number % 2 else 1])
                waiting = waiting[taken:]
            yield from [batches[number] for number in order]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_any_step_is_looked_up_as_the_sequence_from_the_first_step_has_it(n, size):
    lengths = lengths_of(n)
    sequence = list(islice(in_sequence(lengths.tolist(), size, seed=3), 110))
    grouping = LengthGrouping(lengths)
    for step in [109, 0, *range(1, 109, 4)]:  # back and forth
        slots = slots_of(step, n, size, 3, grouping=grouping)
        assert [slot.row for slot in slots if slot.row is not None] == sequence[step]
        assert [slot.position for slot in slots] == list(range(step * size, (step + 1) * size))
        assert all(type(slot.row) is int for slot in slots[: len(sequence[step])])


def test_the_rows_of_a_step_are_known_forever():
    lengths = np.array([5, 3, 9, 3, 8, 1, 7, 2, 6, 4])
    assert epoch_of(0, lengths, 4) == [[5, 7, 3, 1], [8, 6, 4, 2], [0, 9, None, None]]
    assert epoch_of(1, lengths, 4) == [[6, 8, 0, 9], [5, 7, 1, 3], [4, 2, None, None]]


def test_a_batch_is_a_slice_of_the_sorted_lengths_of_its_megabatch():
    lengths = lengths_of(1000)
    steps = epoch_of(0, lengths, 4)
    for start in range(0, 250, BATCHES_PER_MEGABATCH):
        megabatch = [
            lengths[batch].tolist() for batch in steps[start : start + BATCHES_PER_MEGABATCH]
        ]
        assert len(megabatch) == BATCHES_PER_MEGABATCH
        ascending = sorted(sorted(batch) for batch in megabatch)
        assert list(chain(*ascending)) == sorted(chain(*megabatch))
        is_ascending = [batch == sorted(batch) for batch in megabatch]
        is_descending = [batch == sorted(batch, reverse=True) for batch in megabatch]
        assert all(map(max, is_ascending, is_descending))
        assert 15 < sum(is_ascending) < 45, "the last rank would have the longer rows all the time"


def test_the_batches_of_every_megabatch_and_epoch_have_another_order():
    lengths = np.arange(1000)
    orders = set()
    for epoch in range(3):
        steps = epoch_of(epoch, lengths, 4)
        for start in range(0, 250, BATCHES_PER_MEGABATCH):
            shortest = [min(batch) for batch in steps[start : start + BATCHES_PER_MEGABATCH]]
            orders.add(tuple(np.argsort(np.argsort(shortest))))
    assert len(orders) == 15


def test_the_short_batch_at_the_end_of_an_epoch_has_any_lengths():
    lengths = np.arange(199)
    ends = [
        [row for row in epoch_of(epoch, lengths, 4)[-1] if row is not None] for epoch in range(40)
    ]
    assert {len(end) for end in ends} == {3}
    places = {min(end) // 50 for end in ends}
    assert places == {0, 1, 2, 3}


def test_the_sources_of_a_mixture_keep_their_shares_and_their_epochs():
    lengths = lengths_of(230)
    mixture = Mixture([200, 30], [0.7, 0.3])
    grouping = LengthGrouping(lengths)
    for megabatch in range(3):
        first = megabatch * BATCHES_PER_MEGABATCH
        batches = [
            [slot.row for slot in slots_of(step, 230, 8, 5, mixture, grouping)]
            for step in range(first, first + BATCHES_PER_MEGABATCH)
        ]
        positions = np.arange(first * 8, (first + BATCHES_PER_MEGABATCH) * 8)
        assert sorted(chain(*batches)) == sorted(mixture.rows_at(positions, 5).tolist())
        ascending = sorted(sorted(lengths[batch].tolist()) for batch in batches)
        assert list(chain(*ascending)) == sorted(chain(*ascending))


def test_a_start_far_into_a_huge_run_costs_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "llmtrain.data.grouping.permute",
        lambda positions, n, key: asked.append(len(positions)) or positions,
    )
    grouping = LengthGrouping(np.broadcast_to(np.int64(7), 10**12))
    start = 10**13
    batches = list(GlobalBatchSampler(10**12, 64, range(start, start + 2), 0, grouping=grouping))
    assert [len(batch) for batch in batches] == [64, 64]
    assert batches[0][0].position == start * 64
    assert sum(asked) <= 2 * (BATCHES_PER_MEGABATCH * 64 + BATCHES_PER_MEGABATCH)


def test_without_a_seed_the_stored_order_is_kept(rows):
    (first, *_) = train_loader(rows, 8, 8, range(3), seed=None)
    assert first.rows.tolist() == list(range(8))
    assert first.trimming is not None, "rows are trimmed in any order"


# --- layouts and resuming


def shares_of_steps(loader: DataLoader, processes: int) -> list[tuple[LocalBatch, ...]]:
    """Return the batches of all processes for each step."""
    loaders = []
    for rank in range(processes):
        shard = BatchSamplerShard(
            loader.batch_sampler, processes, rank, split_batches=True, even_batches=False
        )
        loaders.append(
            DataLoader(loader.dataset, batch_sampler=shard, collate_fn=loader.collate_fn)
        )
    return list(zip(*loaders, strict=True))


def full_width(batch: Batch, parts: int, width: int) -> Batch:
    """Return a micro-batch with the padding that was trimmed."""
    full = {}
    for name, padding in {"input_ids": 0, "labels": IGNORED, "answers": -1}.items():
        if name in batch:
            halves = batch[name].view(len(batch[name]), parts, -1)
            missing = width // parts - halves.shape[-1]
            full[name] = torch.nn.functional.pad(halves, (0, missing), value=padding).flatten(1)
    return full


@pytest.mark.parametrize(("processes", "micro"), LAYOUTS)
@pytest.mark.parametrize("kind", ["documents", "pairs"])
def test_every_layout_computes_the_same_rows_in_the_same_step(
    rows, pair_rows, kind, processes, micro
):
    table = rows if kind == "documents" else pair_rows
    parts = 1 if kind == "documents" else 2
    columns = SlotRows(table)
    width = columns.columns["labels"][0].shape[1]
    steps = range(2, 35)  # epochs end in between
    reference = list(train_loader(table, 8, 8, steps, seed=5, dropout_seed=6))
    loader = train_loader(table, 8, micro, steps, seed=5, dropout_seed=6)
    for shares, expected in zip(shares_of_steps(loader, processes), reference, strict=True):
        assert torch.cat([share.rows for share in shares]).tolist() == expected.rows.tolist()
        for name in ("token_fingerprint", "label_fingerprint"):
            assert sum(getattr(share, name) for share in shares) == getattr(expected, name)
        batches = list(chain(*(share.batches for share in shares)))
        keys = torch.cat([batch["dropout_keys"] for batch in batches])
        assert torch.equal(keys, expected.columns["dropout_keys"])

        slots = [Slot(0, row if row >= 0 else None) for row in expected.rows.tolist()]
        stored = columns.__getitems__(slots)
        labels = torch.cat([full_width(batch, parts, width)["labels"] for batch in batches])
        assert labels.tolist() == stored.columns["labels"].tolist(), "no target is lost"
        for name in ("input_ids", "answers"):
            if name in stored.columns:
                full = torch.cat([full_width(batch, parts, width)[name] for batch in batches])
                is_row = expected.rows >= 0  # an empty slot has any tokens
                assert torch.equal(full[is_row], torch.from_numpy(stored.columns[name])[is_row])


@pytest.mark.parametrize("start", [0, 1, 28, 29, 49, 50, 57])
def test_training_starts_at_any_step_with_what_an_unbroken_run_would_see(rows, start):
    unbroken = list(train_loader(rows, 4, 2, range(60), seed=5, dropout_seed=5))[start:]
    resumed = train_loader(rows, 4, 2, range(start, 60), seed=5, dropout_seed=5)
    for local_batch, again in zip(unbroken, resumed, strict=True):
        assert local_batch.rows.tolist() == again.rows.tolist()
        for batch, same in zip(local_batch.batches, again.batches, strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[name], same[name]) for name in batch)


# --- trimming


def test_lengths_are_stored_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "TOKENS_PER_BATCH", 7 * WIDTH)
    table = documents(tmp_path, chunks=3)
    assert row_lengths(table).tolist() == lengths_of(ROWS).tolist()
    longer = np.maximum(lengths_of(40, 32), lengths_of(41, 32)[1:])
    assert row_lengths(pairs(tmp_path)).tolist() == longer.tolist()
    (tmp_path / "packed").mkdir()
    assert row_lengths(documents(tmp_path / "packed", packing=True)) is None


def test_there_are_eight_sizes_between_two_powers_of_two():
    sizes = sorted({padded_size(length, smallest=8) for length in range(2000)})
    for power in (8, 16, 32, 64, 128, 256, 512):
        assert sum(power < size <= 2 * power for size in sizes) == 8
    assert sizes[:19] == [8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40]
    for length in range(1, 2000):
        assert length <= padded_size(length, smallest=8) <= max(8, length * 9 / 8)


def test_a_row_keeps_its_tokens_and_never_grows():
    for full in (5, 9, 65, 1025):
        for longest in range(full + 1):
            assert longest <= trimmed_width(longest, full) <= full
    assert trimmed_width(0, 1025) == 9  # of empty slots
    assert trimmed_width(1025, 1025) == 1025


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_a_micro_batch_is_as_wide_as_its_longest_row_asks(rows, pair_rows, micro):
    for table, parts, full in ((rows, 1, WIDTH), (pair_rows, 2, 32)):
        lengths = row_lengths(table)
        for local_batch in train_loader(table, 8, micro, range(40), seed=1):
            computed = 0
            for batch, numbers in zip(
                local_batch.batches, local_batch.rows.split(micro), strict=True
            ):
                longest = max(
                    (int(lengths[row]) for row in numbers.tolist() if row >= 0), default=0
                )
                width = parts * trimmed_width(longest, full)
                assert all(column.is_contiguous() for column in batch.values())
                assert {column.shape for column in batch.values()} == {(len(numbers), width)}
                computed += batch["labels"][:, 1:].numel()
            assert local_batch.positions == computed


def test_what_is_prepared_and_further_columns_are_of_the_trimmed_rows(rows):
    asked = []

    def prepare(batch: Batch) -> Batch:
        asked.append(batch["labels"].shape)
        return {"targets": (batch["labels"][:, 1:] != IGNORED).sum(1)}

    read = SlotRows(rows).__getitems__([Slot(i, i) for i in range(6)])
    read.columns["reference"] = np.zeros((6, 2), np.float32)
    local_batch = Collate(4, dropout_seed=1, prepare=prepare)(read)
    assert [batch["labels"].shape for batch in local_batch.batches] == asked
    assert len({shape[1] for shape in asked}) == 2
    assert [batch["reference"].shape for batch in local_batch.batches] == [(4, 2), (2, 2)]
    assert torch.cat([b["targets"] for b in local_batch.batches]).equal(local_batch.targets)
    sent = local_batch.to(torch.device("meta"))
    assert [batch["labels"].shape for batch in sent.batches] == asked


def test_evaluation_is_trimmed_in_the_stored_order(rows):
    lengths = lengths_of(ROWS)
    for processes, micro in [(1, 8), (2, 4)]:
        seen = []
        for shares in shares_of_steps(eval_loader(rows, processes, micro), processes):
            for share in shares:
                seen += share.rows.tolist()
                for batch, numbers in zip(share.batches, share.rows.split(micro), strict=True):
                    longest = max((lengths[row] for row in numbers.tolist() if row >= 0), default=0)
                    assert batch["labels"].shape[1] == trimmed_width(int(longest), WIDTH)
        assert [row for row in seen if row >= 0] == list(range(ROWS))


def test_there_are_few_shapes(rows):
    loader = train_loader(rows, 8, 8, range(200), seed=1)
    shapes = {batch["labels"].shape for share in loader for batch in share.batches}
    assert 1 < len(shapes) <= count_shapes(rows) <= 25


def test_packed_rows_are_neither_grouped_nor_trimmed(tmp_path):
    table = documents(tmp_path, packing=True)
    loader = train_loader(table, 8, 4, range(5), seed=1)
    assert loader.batch_sampler.grouping is None
    assert count_shapes(table) == 1
    for local_batch in loader:
        assert local_batch.trimming is None
        assert {batch["labels"].shape for batch in local_batch.batches} == {(4, WIDTH)}


def test_the_order_is_part_of_what_a_run_is(tmp_path, accelerator, rows):
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    packed = documents(tmp_path, packing=True)

    def order(table: TokenRows, in_order: bool = False) -> str:
        tokenized = Tokenized(
            table,
            None,
            tokenizer,
            metadata=SimpleNamespace(data_sha256="", tokenizer_sha256="", block_size=64),
            in_order=in_order,
        )
        settings = Settings(data=DataConfig())
        bundle = SimpleNamespace(files=SimpleNamespace(config={}), start=None)
        fingerprint = run_fingerprint(
            accelerator,
            settings,
            tokenized,
            bundle,
            parts=SimpleNamespace(fingerprint=dict, optimizer_fingerprint=dict),
            rates=SimpleNamespace(fingerprint={}),
            layout=Layout(processes=1, accumulation=1, micro_batch=8),
        )
        return fingerprint["order"]

    assert order(packed) == "shuffled"
    assert order(rows) == "shuffled, grouped by length over 50 batches"
    assert order(rows, in_order=True) == order(packed, in_order=True) == "stored"
    own = Tokenized.of(rows, tokenizer)
    assert order(own.train) == "shuffled"
    assert own.train.column_names == ["input_ids", "labels"], "their lengths are not known"


# --- models


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float64), ("lfm2", torch.float64), ("mixtral", torch.float32)],
)
def test_a_row_has_the_same_loss_and_gradient_whatever_is_trimmed(rows, family, dtype):
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    sizes = "hidden_size=32,num_hidden_layers=2,intermediate_size=48,num_attention_heads=4"
    config = ModelConfig(from_config=family, max_length=64, config_overrides=sizes)
    stand_in = SomeRows(tokenizer, is_packed=False)
    bundle = place(Accelerator(cpu=True), load_model(config, None, stand_in, 0, "no"))
    model = bundle.model.to(dtype).train()

    read = SlotRows(rows).__getitems__([Slot(i, i) for i in range(7)] + [Slot(7, None)])

    def gradient(read: RowBatch, micro: int) -> torch.Tensor:
        model.zero_grad()
        collate = Collate(micro, prepare=bundle.prepare_batch)
        losses = [model(**batch) for batch in collate(read).batches]
        total = torch.stack(losses).sum()
        total.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat([*parts, total.detach()[None]])

    expected = gradient(read._replace(lengths=None), micro=8)
    rounding = 1e-9 if dtype == torch.float64 else 1e-3
    for micro in (1, 2, 8):
        found = gradient(read, micro)
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
