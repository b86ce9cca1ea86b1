"""Fixtures for tests that need several machines."""

from collections.abc import Iterator

import pytest

from tests.machines import UnavailableError, two_machines


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Yield the names of two machines that reach each other."""
    try:
        with two_machines() as names:
            yield names
    except UnavailableError as error:
        pytest.skip(str(error))
