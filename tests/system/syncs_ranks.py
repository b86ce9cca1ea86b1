"""Run by test_syncs.py: a recipe, and what in each of its steps would wait for a GPU. `syncs_ranks.py FOUND ...`

A CPU never waits, but it is asked the same: to read a value, or to make a tensor of a size that values decide. What is
computed on other threads, as batches are, is not counted.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.training import loop

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"}
READING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
    "equal",
}


class Reads(TorchFunctionMode):
    """Methods that read, called by Python."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found, self.inside = found, False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in READS or self.inside:
            return function(*args, **(kwargs or {}))
        self.found[f"{name} in {where()}"] += 1
        self.inside = True  # `float` calls `item`
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.inside = False


class Operations(TorchDispatchMode):
    """Operations that read, or whose result has a size that values decide; and how many there are of all."""

    def __init__(self, found: Counter[str], reads: Reads) -> None:
        super().__init__()
        self.found, self.reads, self.count = found, reads, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        name = function.overloadpacket.__name__
        places = args[1] if name == "index" else args[1:2] if name.startswith("index") else ()
        masks = any(
            isinstance(place, torch.Tensor) and place.dtype == torch.bool for place in places
        )
        if (name in READING or masks) and not self.reads.inside:
            self.found[f"{name} in {where()}"] += 1
        return function(*args, **(kwargs or {}))


def where() -> str:
    frames = [
        f
        for f in traceback.extract_stack()
        if "syncs_ranks" not in f.filename and "overrides" not in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def main() -> None:
    found_file, recipe, *flags = sys.argv[1:]
    honest = loop.read_batches
    steps: list[dict[str, Any]] = []
    graphs: list[Any] = []
    compiles = "--torch_compile" in flags  # not under the modes that count
    own = torch.compile

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile = lambda function, **settings: own(function, **settings | {"backend": backend})

    def counted(*arguments: Any) -> Any:
        for batch in honest(*arguments):
            found: Counter[str] = Counter()
            reads = Reads(found)
            operations = Operations(found, reads)
            with (
                contextlib.nullcontext() if compiles else reads,
                contextlib.nullcontext() if compiles else operations,
            ):
                yield batch
            steps.append({"waits": found, "operations": operations.count, "graphs": len(graphs)})

    loop.read_batches = counted
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe)["main"](flags)
    if os.environ.get("RANK", "0") == "0":
        Path(found_file).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
