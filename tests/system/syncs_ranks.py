"""Started by test_syncs.py: train with a recipe, and count what would wait for a GPU.

`syncs_ranks.py FILE RECIPE FLAG...` writes a list with an entry for each step:
    waits: how often each place in the code waited.
    graphs: the number of graphs that torch.compile has made so far.

A CPU never waits, but the same calls would wait for a GPU: those that read a value, and those whose
result has a size that depends on values. Other threads, which make batches, are not counted.
"""

import contextlib
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


class StepCounter:
    """Counts within each step, from the time that the loop has its batch until it asks for the next."""

    def __init__(self, is_compiled: bool) -> None:
        self.is_compiled = is_compiled  # then operations cannot be counted
        self.graphs = 0
        self.steps: list[dict[str, Any]] = []
        self.read_batches = loop.read_batches
        self.compile = torch.compile
        # A single object, since torch compiles a function again for another backend.
        self.backend = self.count_graph

    def install(self) -> None:
        loop.read_batches = self.counted_batches
        torch.compile = self.counted_compile

    def counted_batches(self, *arguments: Any) -> Iterator[Any]:
        for batch in self.read_batches(*arguments):
            waits: Counter[str] = Counter()
            methods = MethodCounter(waits)
            with contextlib.ExitStack() as counting:
                if not self.is_compiled:
                    counting.enter_context(methods)
                    counting.enter_context(OperationCounter(waits, methods))
                yield batch
            self.steps.append({"waits": waits, "graphs": self.graphs})

    def counted_compile(self, function: Any, **settings: Any) -> Any:
        return self.compile(function, **settings | {"backend": self.backend})

    def count_graph(self, graph: Any, inputs: list[Any]) -> Any:
        self.graphs += 1
        return graph.forward


def main() -> None:
    result_file, recipe, *flags = sys.argv[1:]
    counter = StepCounter(is_compiled="--torch_compile" in flags)
    counter.install()

    sys.argv = [recipe, *flags]
    runpy.run_path(recipe)["main"](flags)

    if os.environ.get("RANK", "0") == "0":
        Path(result_file).write_text(json.dumps(counter.steps))


if __name__ == "__main__":
    main()
