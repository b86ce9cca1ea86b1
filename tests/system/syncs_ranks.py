"""Started by test_syncs.py: train with a recipe, and count what would wait for a GPU.

`syncs_ranks.py FILE RECIPE FLAG...` writes, for each step, how often each place in the code waited.

A CPU never waits, but the same calls would wait for a GPU: those that read a value, and those whose
result has a size that depends on values. Other threads, which make batches, are not counted.
"""

import json
import os
import runpy
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.training import loop

# Methods of a tensor, and operations, that read its values, or whose result has a size that depends
# on them.
READING_METHODS = {*shlex.split("item tolist numpy cpu __bool__ __float__ __int__ __index__")}
READING_OPERATIONS = {
    *shlex.split("_local_scalar_dense nonzero masked_select unique_dim _unique2 is_nonzero equal")
}


class MethodCounter(TorchFunctionMode):
    """Counts the methods that Python calls to read a tensor."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits
        self.is_reading = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in READING_METHODS or self.is_reading:
            return function(*args, **(kwargs or {}))

        self.waits[f"{name} in {calling_line()}"] += 1
        self.is_reading = True  # so that the `item` within `float` does not count
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.is_reading = False


class OperationCounter(TorchDispatchMode):
    """Counts the operations that read, unless a counted method calls them."""

    def __init__(self, waits: Counter[str], methods: MethodCounter) -> None:
        super().__init__()
        self.waits = waits
        self.methods = methods

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        is_read = name in READING_OPERATIONS or has_mask(name, args)
        if is_read and not self.methods.is_reading:
            self.waits[f"{name} in {calling_line()}"] += 1
        return function(*args, **(kwargs or {}))


def has_mask(operation: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operation selects elements with a tensor of bools."""
    if not operation.startswith("index"):
        return False
    indices = args[1] if operation == "index" else args[1:2]
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def calling_line() -> str:
    """Return the file and line that has called torch."""
    own_files = ("syncs_ranks.py", "overrides.py")
    stack = traceback.extract_stack()
    callers = [frame for frame in stack if not frame.filename.endswith(own_files)]
    return f"{Path(callers[-1].filename).name}:{callers[-1].lineno}"


def main() -> None:
    result_file, recipe, *flags = sys.argv[1:]
    read_batches = loop.read_batches
    waits_by_step: list[Counter[str]] = []

    def counted_batches(*arguments: Any) -> Iterator[Any]:
        """Count from the time that the loop has its batch until it asks for the next."""
        for batch in read_batches(*arguments):
            waits: Counter[str] = Counter()
            methods = MethodCounter(waits)
            with methods, OperationCounter(waits, methods):
                yield batch
            waits_by_step.append(waits)

    loop.read_batches = counted_batches
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe)["main"](flags)

    if os.environ.get("RANK", "0") == "0":
        Path(result_file).write_text(json.dumps(waits_by_step))


if __name__ == "__main__":
    main()
