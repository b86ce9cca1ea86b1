"""Wait for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until a condition is true.

    Raises:
        AssertionError: if it is not true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)
