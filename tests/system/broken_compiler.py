"""Run by test_compile_ranks.py: recipes/gpt.py with a compiler that fails on rank 1.

`broken_compiler.py FLAGS...` takes the flags of the recipe. It writes to the file that FAILURE_FILE
names when the compiler failed. On rank 0 the compiler works and takes no time.
"""

import functools
import os
import time
from pathlib import Path
from typing import Any

from llmtrain import launch
from llmtrain.training import compiling
from recipes import gpt


def fail(graph: Any, inputs: Any) -> None:
    Path(os.environ["FAILURE_FILE"]).write_text(str(time.time()))
    raise RuntimeError("no C++ compiler here\nand more")


if __name__ == "__main__":
    backend = fail if os.environ["RANK"] == "1" else "eager"
    compiling._compile = functools.partial(compiling._compile, backend=backend)
    launch(gpt.main)
