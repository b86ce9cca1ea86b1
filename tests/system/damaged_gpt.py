"""Train as tests/system/votes.py does, if the row of the variable DAMAGED_ROW cannot be read."""

import os

import llmtrain as lt
from llmtrain.data.loader import LocalBatches
from llmtrain.errors import DamagedRowsError
from tests.system.votes import main

read = LocalBatches.read


def read_or_fail(batches: LocalBatches, slots: list) -> dict:
    if int(os.environ["DAMAGED_ROW"]) in [slot.row for slot in slots]:
        raise DamagedRowsError("shard 7: block 3 differs from its hash; copy it again.")
    return read(batches, slots)


if __name__ == "__main__":
    LocalBatches.read = read_or_fail
    lt.launch(main)
