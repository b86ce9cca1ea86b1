import pytest

from llmtrain.console import duration_text, rate_text, size_text
from llmtrain.devices import size_bytes
from llmtrain.errors import UserError


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1024, "1.00 KiB"),
        (20.5 * 2**20, "20.5 MiB"),
        (3 * 2**50, "3,072 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80gb", 80e9),
        ("24gib", 24 * 2**30),
        ("2tib", 2 * 1024**4),
        ("400Gbit", 50e9),
        ("400Gbps", 50e9),
        ("50 GB/s", 50e9),
        ("100Mbit/s", 12.5e6),
    ],
)
def test_a_size_is_read(text: str, size: float) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "gb", "80 cards", "-1gb", "0gb"])
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="80gb"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.904e-4, "190 µs"),
        (120, "2.00 min"),
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
