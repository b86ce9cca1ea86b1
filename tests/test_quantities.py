import pytest

from llmtrain.quantities import duration_text, rate_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (20.5 * 2**20, "20.5 MiB"),
        (706 * 2**20, "706 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**50, "3,072 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.904e-4, "190 µs"),
        (1e-9, "0.00 µs"),
        (0.00152, "1.52 ms"),
        (0.343, "343 ms"),
        (1, "1.00 s"),
        (119, "119 s"),
        (120, "2.00 min"),
        (5400, "90.0 min"),
        (7200, "2.00 h"),
        (47 * 3600, "47.0 h"),
        (48 * 3600, "2.00 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0.00 B/s"), (12, "12.0 B/s"), (6.8e6, "6.80 MB/s"), (4.5e11, "450 GB/s")],
)
def test_rates(number: float, text: str) -> None:
    assert rate_text(number, "B/s") == text
