"""The batches of all processes, as a run loads them, and their comparison."""

from collections.abc import Iterable
from itertools import chain

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from llmtrain.interfaces.batches import Batch, LocalBatch


def shares_of_steps(loader: DataLoader, processes: int) -> list[tuple[LocalBatch, ...]]:
    """Return the batches of all processes for each step."""
    loaders = []
    for rank in range(processes):
        # Accelerate gives a rank its slices of the global batches in this way.
        shard = BatchSamplerShard(
            loader.batch_sampler, processes, rank, split_batches=True, even_batches=False
        )
        loaders.append(
            DataLoader(loader.dataset, batch_sampler=shard, collate_fn=loader.collate_fn)
        )
    return list(zip(*loaders, strict=True))


def micro_batches_of(shares: Iterable[LocalBatch]) -> list[Batch]:
    """Return the micro-batches of all processes, in the order of the ranks."""
    return list(chain.from_iterable(share.batches for share in shares))


def assert_same_batches(actual: LocalBatch, expected: LocalBatch) -> None:
    assert actual.rows.equal(expected.rows)
    for batch, expected_batch in zip(actual.batches, expected.batches, strict=True):
        assert batch.keys() == expected_batch.keys()
        assert all(batch[name].equal(expected_batch[name]) for name in batch)
