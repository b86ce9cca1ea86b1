"""Unpacked rows: each once per epoch, beside rows of similar length, without needless padding."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.data import packing
from llmtrain.data.loader import (
    LocalBatches,
    count_shapes,
    eval_loader,
    row_lengths,
    train_loader,
    trimmed_width,
)
from llmtrain.data.order import BATCHES_PER_MEGABATCH, GlobalBatchSampler, Mixture, Slot
from llmtrain.data.packing import Examples, TokenStore, write_rows
from llmtrain.data.shards import ArrayRows, Shard, TokenRows, facts_of
from llmtrain.data.tokenized import Tokenized
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.interfaces.batches import IGNORED, Batch, LocalBatch, Trimming, padded_size
from llmtrain.models.config import ModelConfig
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import TrainingAccelerator
from tests.data.batches import micro_batches_of, shares_of_steps
from tests.models.some_rows import SomeRows

WIDTH = 65
ROWS = 230
SIZES = [(1, 4), (9, 8), (50, 1), (230, 4), (1003, 7)]


def random_lengths(n: int, largest: int = WIDTH) -> np.ndarray:
    """Many short lengths and a few long ones, as in chat data."""
    lengths = np.random.default_rng(n).lognormal(3.0, 0.8, n)
    return lengths.astype(np.int64).clip(2, largest)


PAIR_LENGTHS = np.stack([random_lengths(40, 32), random_lengths(41, 32)[1:]], axis=1)


def write_documents(folder: Path, packing: bool = False) -> TokenRows:
    """Write documents of ``random_lengths(ROWS)`` random tokens; two of three are targets."""
    random_numbers = np.random.default_rng(0)
    path = folder / "documents.safetensors"
    store = TokenStore(path.with_suffix(".tokens"))
    for length in random_lengths(ROWS).tolist():
        ids = random_numbers.integers(1, 200, length)
        store.add(ids, random_numbers.random(length) < 2 / 3)
    stops = np.diff(store.bounds)[:, None]
    examples = Examples(np.arange(len(store))[:, None], starts=np.zeros_like(stops), stops=stops)
    write_rows(path, store, examples, width=WIDTH, packing=packing, vocabulary=200)
    return TokenRows([Shard(folder, facts_of(path))])


def write_pairs(folder: Path) -> TokenRows:
    """Write pairs of answers with ``PAIR_LENGTHS`` random tokens, each answer in half a row."""
    random_numbers = np.random.default_rng(0)
    path = folder / "pairs.safetensors"
    store = TokenStore(path.with_suffix(".tokens"))
    for length in PAIR_LENGTHS.flatten().tolist():
        store.add(random_numbers.integers(1, 200, length), np.arange(length) > 0)
    examples = Examples(
        sequences=np.arange(len(store)).reshape(-1, 2),
        starts=np.zeros_like(PAIR_LENGTHS),
        stops=PAIR_LENGTHS,
        is_first_desirable=np.ones(len(PAIR_LENGTHS), bool),
    )
    write_rows(path, store, examples, width=64, packing=False, vocabulary=200)
    return TokenRows([Shard(folder, facts_of(path))])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return write_documents(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def pair_rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(params=["documents", "pairs"])
def table(request) -> TokenRows:
    name = "rows" if request.param == "documents" else "pair_rows"
    return request.getfixturevalue(name)


# --- the order


def epoch_of(epoch: int, lengths: np.ndarray, size: int, seed: int = 0) -> list[list[int | None]]:
    """Return the rows of each step of an epoch."""
    n = len(lengths)
    steps_per_epoch = -(-n // size)
    first = epoch * steps_per_epoch
    steps = range(first, first + steps_per_epoch)
    sampler = GlobalBatchSampler(n, size, steps, seed=seed, lengths=lengths)
    return [[slot.row for slot in slots] for slots in sampler]


def megabatches_of(steps: list) -> list[list]:
    return [
        steps[start : start + BATCHES_PER_MEGABATCH]
        for start in range(0, len(steps), BATCHES_PER_MEGABATCH)
    ]


def is_sorted(values: np.ndarray) -> bool:
    return bool((np.diff(values) >= 0).all())


def assert_slices_of_sorted_lengths(megabatch: list[list[int]], lengths: np.ndarray) -> None:
    """Check that no batch has a length between the lengths of another batch."""
    batches = sorted(sorted(lengths[batch].tolist()) for batch in megabatch)
    joined = list(chain.from_iterable(batches))
    assert joined == sorted(joined)


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_an_epoch_holds_every_row_once_and_empty_slots_only_at_its_end(n, size):
    for epoch in range(3):
        order = list(chain.from_iterable(epoch_of(epoch, random_lengths(n), size, seed=2**63 - 1)))
        assert len(order) % size == 0
        assert sorted(order[:n]) == list(range(n))
        assert order[n:] == [None] * (-n % size)


def test_a_megabatch_has_its_ungrouped_rows_in_slices_of_sorted_lengths():
    lengths = random_lengths(1000)
    for epoch in range(2):
        steps = range(epoch * 250, (epoch + 1) * 250)
        sampler = GlobalBatchSampler(1000, 4, steps, seed=0)
        ungrouped = [[slot.row for slot in slots] for slots in sampler]

        megabatches = megabatches_of(epoch_of(epoch, lengths, 4))
        assert len(megabatches) == 5
        for megabatch, expected in zip(megabatches, megabatches_of(ungrouped), strict=True):
            assert sorted(chain.from_iterable(megabatch)) == sorted(chain.from_iterable(expected))
            assert_slices_of_sorted_lengths(megabatch, lengths)


def test_half_of_the_batches_ascend_so_that_no_rank_always_has_long_rows():
    lengths = np.random.default_rng(0).permutation(1000)
    for megabatch in megabatches_of(epoch_of(0, lengths, 4)):
        ascending = [batch for batch in megabatch if is_sorted(lengths[batch])]
        descending = [batch for batch in megabatch if is_sorted(lengths[batch[::-1]])]
        assert len(ascending) == len(descending) == BATCHES_PER_MEGABATCH // 2


def test_the_batches_of_every_megabatch_and_epoch_have_another_order():
    orders = set()
    for epoch in range(3):
        for megabatch in megabatches_of(epoch_of(epoch, np.arange(1000), 4)):
            shortest = [min(batch) for batch in megabatch]
            orders.add(tuple(np.argsort(shortest)))
    assert len(orders) == 15


def test_the_short_batch_at_the_end_of_an_epoch_has_any_lengths():
    quarters = set()
    for epoch in range(40):
        last_batch = epoch_of(epoch, np.arange(199), 4)[-1]
        assert last_batch[3:] == [None]
        quarters.add(min(last_batch[:3]) // 50)
    assert quarters == {0, 1, 2, 3}


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_a_step_has_the_same_rows_whichever_step_was_looked_up_before(n, size):
    lengths = random_lengths(n)
    from_the_start = list(GlobalBatchSampler(n, size, range(110), seed=3, lengths=lengths))
    positions = [slot.position for slot in chain.from_iterable(from_the_start)]
    assert positions == list(range(110 * size))

    sampler = GlobalBatchSampler(n, size, range(110), seed=3, lengths=lengths)
    for step in [109, 0, *range(1, 109, 12)]:
        slots = sampler.slots_of(step)
        assert slots == from_the_start[step]
        assert {type(slot.row) for slot in slots} <= {int, type(None)}


def test_the_rows_of_a_step_never_change_between_versions():
    lengths = np.array([5, 3, 9, 3, 8, 1, 7, 2, 6, 4])
    assert epoch_of(0, lengths, 4) == [[5, 7, 3, 1], [8, 6, 4, 2], [0, 9, None, None]]
    assert epoch_of(1, lengths, 4) == [[6, 8, 0, 9], [5, 7, 1, 3], [4, 2, None, None]]

    many_equal_lengths = np.arange(210) % 7
    later_megabatches = epoch_of(0, many_equal_lengths, 2)
    assert later_megabatches[50:53] == [[193, 18], [194, 110], [196, 98]]
    assert later_megabatches[104] == [157, 102]


def test_grouping_keeps_the_rows_that_a_mixture_gives_to_a_megabatch():
    lengths = random_lengths(230)
    mixture = Mixture([200, 30], [0.7, 0.3])
    sampler = GlobalBatchSampler(230, 8, range(150), seed=5, mixture=mixture, lengths=lengths)
    batches = [[slot.row for slot in slots] for slots in sampler]

    for number, megabatch in enumerate(megabatches_of(batches)):
        positions = number * 400 + np.arange(400)
        expected = mixture.rows_at(positions, seed=5).tolist()
        assert sorted(chain.from_iterable(megabatch)) == sorted(expected)
        assert_slices_of_sorted_lengths(megabatch, lengths)


def test_a_late_step_of_a_huge_run_permutes_only_the_rows_near_it(monkeypatch):
    permuted = []

    def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
        permuted.append(len(positions))
        return positions

    monkeypatch.setattr("llmtrain.data.order.permute", permute)
    steps = range(10**13, 10**13 + 2)
    for lengths in (None, np.broadcast_to(np.int64(7), 10**12)):
        permuted.clear()
        batches = list(GlobalBatchSampler(10**12, 64, steps, seed=0, lengths=lengths))
        assert [len(batch) for batch in batches] == [64, 64]
        assert batches[0][0].position == steps[0] * 64
        assert 0 < sum(permuted) <= 2 * 4096  # two steps may be in two megabatches


def test_without_a_seed_the_stored_order_is_kept(rows):
    loader = train_loader(rows, 8, micro_batch=8, steps=range(3), seed=None)
    first = next(iter(loader))
    assert first.rows.tolist() == list(range(8))
    assert first.trimming is not None


def test_every_layout_and_a_resumed_run_have_the_same_batches(table):
    reference = train_loader(table, 8, micro_batch=8, steps=range(35), seed=5, dropout_seed=6)
    loader = train_loader(table, 8, micro_batch=2, steps=range(2, 35), seed=5, dropout_seed=6)
    expected_batches = list(reference)[2:]  # some epochs end in between
    for shares, expected in zip(shares_of_steps(loader, 2), expected_batches, strict=True):
        assert torch.cat([share.rows for share in shares]).equal(expected.rows)
        keys = torch.cat([batch["dropout_keys"] for batch in micro_batches_of(shares)])
        assert keys.equal(expected.columns["dropout_keys"])
        assert sum(share.token_fingerprint for share in shares) == expected.token_fingerprint


# --- trimming


def test_the_number_of_tokens_is_stored_with_each_row(tmp_path, monkeypatch, pair_rows):
    monkeypatch.setattr(packing, "TOKENS_PER_BATCH", 7 * WIDTH)
    rows = write_documents(tmp_path)
    assert row_lengths(rows).tolist() == random_lengths(ROWS).tolist()
    assert row_lengths(pair_rows).tolist() == PAIR_LENGTHS.max(axis=1).tolist()


def test_padded_sizes_are_few_and_at_most_an_eighth_too_large():
    sizes = sorted({padded_size(length, smallest=8) for length in range(2000)})
    assert sizes[:19] == [8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40]
    for power in (8, 16, 32, 64, 128, 256, 512):
        assert sum(power < size <= 2 * power for size in sizes) == 8
    for length in range(1, 2000):
        assert length <= padded_size(length, smallest=8) <= max(8, length * 9 / 8)


def test_a_trimmed_row_keeps_its_tokens_and_has_inputs_of_a_padded_size():
    for full_width in (5, 9, 65, 1025):
        for longest in range(full_width + 1):
            largest_inputs = max(8, (longest - 1) * 9 / 8)  # the last token is no input
            largest = min(full_width, 1 + largest_inputs)
            assert longest <= trimmed_width(longest, full_width) <= largest
    assert trimmed_width(0, 1025) == 9  # only empty slots
    assert trimmed_width(1025, 1025) == 1025


def expected_widths(local_batch: LocalBatch, lengths: np.ndarray, full_width: int) -> list[int]:
    """Return the trimmed width of each micro-batch, from the lengths of its rows."""
    widths = []
    for numbers in local_batch.rows.split(local_batch.micro_batch):
        longest = max((int(lengths[row]) for row in numbers.tolist() if row >= 0), default=0)
        widths.append(trimmed_width(longest, full_width))
    return widths


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_a_micro_batch_is_as_wide_as_its_longest_row_or_answer(table, micro_batch):
    lengths = row_lengths(table)
    halves = 2 if "answers" in table.column_names else 1
    full_width = len(table[0]["labels"]) // halves
    for local_batch in train_loader(table, 8, micro_batch, steps=range(40), seed=1):
        widths = expected_widths(local_batch, lengths, full_width)
        for batch, width in zip(local_batch.batches, widths, strict=True):
            assert {column.shape for column in batch.values()} == {(micro_batch, halves * width)}
            assert all(column.is_contiguous() for column in batch.values())
        positions = sum(micro_batch * halves * (width - 1) for width in widths)
        assert local_batch.positions == positions


def pad_again(column: torch.Tensor, halves: int, full_width: int, padding: int) -> torch.Tensor:
    """Append the padding that was trimmed from each half of each row."""
    parts = column.view(len(column), halves, -1)
    trimmed = full_width // halves - parts.shape[-1]
    return torch.nn.functional.pad(parts, (0, trimmed), value=padding).flatten(1)


def test_trimming_removes_nothing_but_padding(table):
    stored_rows = LocalBatches(table, micro_batch=3)
    is_pair = "answers" in table.column_names
    padding = {"input_ids": 0, "labels": IGNORED}
    if is_pair:
        padding["answers"] = -1

    for local_batch in train_loader(table, 8, micro_batch=3, steps=range(35), seed=5):
        slots = [Slot(0, row if row >= 0 else None) for row in local_batch.rows.tolist()]
        is_row = local_batch.rows >= 0  # an empty slot may hold any tokens, but no label
        stored = stored_rows.read(slots)

        for name, value in padding.items():
            expected = torch.from_numpy(stored[name]).long()
            columns = [
                pad_again(batch[name], 1 + is_pair, expected.shape[1], padding=value)
                for batch in local_batch.batches
            ]
            restored = torch.cat(columns)
            assert restored[is_row].equal(expected[is_row])
            if name == "labels":
                assert (restored[~is_row] == IGNORED).all()


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_column_with_several_numbers_per_token_is_trimmed_like_the_tokens(halves, shape):
    column = torch.rand(5, halves, 8, *shape)
    no_rows = torch.zeros(0)
    local_batch = LocalBatch(
        {"labels": torch.zeros(5, halves * 8), "scores": column.flatten(1, 2)},
        micro_batch=3,
        rows=no_rows,
        targets=no_rows,
        token_fingerprint=0,
        label_fingerprint=0,
        trimming=Trimming(columns=("labels", "scores"), parts=halves, widths=(6, 4)),
    )

    first, second = local_batch.batches

    assert first["scores"].equal(torch.cat([*column[:3, :, :6].unbind(1)], dim=1))
    assert second["scores"].equal(torch.cat([*column[3:, :, :4].unbind(1)], dim=1))
    assert second["scores"].shape[:2] == second["labels"].shape == (2, halves * 4)


def test_a_model_prepares_micro_batches_that_are_trimmed(rows):
    prepared_shapes = []

    def prepare(batch: Batch) -> Batch:
        prepared_shapes.append(batch["labels"].shape)
        return {"targets": (batch["labels"][:, 1:] != IGNORED).sum(1)}

    with_reference = rows.with_column("reference", np.zeros((len(rows), 2), np.float32))
    batches = LocalBatches(with_reference, 4, dropout_seed=1, prepare=prepare)
    local_batch = batches.__getitems__([Slot(i, i) for i in range(6)])

    first, second = prepared_shapes
    assert first[1] != second[1]
    targets = torch.cat([batch["targets"] for batch in local_batch.batches])
    assert targets.equal(local_batch.targets)
    on_device = local_batch.to(torch.device("meta"))
    for batches in (local_batch.batches, on_device.batches):
        assert [batch["labels"].shape for batch in batches] == prepared_shapes
        assert [batch["reference"].shape for batch in batches] == [(4, 2), (2, 2)]
    assert all(column.is_meta for batch in on_device.batches for column in batch.values())
    assert not on_device.rows.is_meta
    assert not on_device.targets.is_meta


@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 8), (2, 4)])
def test_eval_rows_are_trimmed_in_the_stored_order(rows, processes, micro_batch):
    lengths = random_lengths(ROWS)
    loader = eval_loader(rows, processes, micro_batch)
    order = []
    for share in chain.from_iterable(shares_of_steps(loader, processes)):
        order += share.rows.tolist()
        widths = [batch["labels"].shape[1] for batch in share.batches]
        assert widths == expected_widths(share, lengths, WIDTH)
    assert [row for row in order if row >= 0] == list(range(ROWS))


def test_trimmed_batches_have_few_shapes(rows):
    shapes = set()
    for local_batch in train_loader(rows, 8, micro_batch=8, steps=range(200), seed=1):
        shapes.update(batch["labels"].shape for batch in local_batch.batches)
    assert 1 < len(shapes) <= count_shapes(rows) <= 25


def test_packed_rows_are_neither_grouped_nor_trimmed(tmp_path):
    rows = write_documents(tmp_path, packing=True)
    assert row_lengths(rows) is None
    assert count_shapes(rows) == 1

    loader = train_loader(rows, 8, micro_batch=4, steps=range(5), seed=1)
    assert loader.batch_sampler.lengths is None
    for local_batch in loader:
        assert local_batch.trimming is None
        assert {batch["labels"].shape for batch in local_batch.batches} == {(4, WIDTH)}


def test_the_order_of_rows_has_a_name_for_the_fingerprint(tmp_path, rows):
    packed = write_documents(tmp_path, packing=True)
    assert Tokenized(packed, None, None, metadata=None).order == "shuffled"
    assert Tokenized(packed, None, None, metadata=None, in_order=True).order == "stored"
    grouped = Tokenized(rows, None, None, metadata=None)
    assert grouped.order == "shuffled, grouped by length over 50 batches"
    # A recipe may pass on rows that another call has made, with their lengths. These are no tokens.
    given = Tokenized.of(rows, None)
    assert given.order == grouped.order
    tokens = ArrayRows({name: rows.column(name) for name in ("input_ids", "labels")})
    assert given.metadata == Tokenized.of(TokenRows([tokens]), None).metadata


# --- models


@pytest.mark.parametrize(
    ("family", "dtype", "rounding"),
    [
        ("llama", torch.float64, 1e-9),
        ("lfm2", torch.float64, 1e-9),
        ("mixtral", torch.float32, 1e-3),
    ],
)
def test_trimming_changes_neither_loss_nor_gradient(rows, family, dtype, rounding):
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    sizes = "hidden_size=32,num_hidden_layers=2,intermediate_size=48,num_attention_heads=4"
    config = ModelConfig(from_config=family, max_length=64, config_overrides=sizes)
    data = SomeRows(tokenizer, is_packed=False)
    loaded = load_model(config, None, data, seed=0, precision="no")
    bundle = move_to_devices(TrainingAccelerator(cpu=True).ranks, loaded)
    model = bundle.model.to(dtype).train()

    slots = [*(Slot(i, i) for i in range(7)), Slot(7, None)]

    def loss_and_gradient(rows: TokenRows, micro_batch: int) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        batches = LocalBatches(rows, micro_batch, prepare=bundle.prepare_batch)
        loss = sum(model(**batch) for batch in batches.__getitems__(slots).batches)
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return loss.detach(), torch.cat(gradients)

    columns = {name: rows.column(name) for name in ("input_ids", "labels")}
    untrimmed = TokenRows([ArrayRows(columns)])
    expected = loss_and_gradient(untrimmed, micro_batch=8)
    for micro_batch in (1, 2, 8):
        actual = loss_and_gradient(rows, micro_batch)
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)
