"""Sizes and durations read and print as people write them, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.sizes import BYTES_MAX, format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48GiB", 48 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.1kB", 100),
        ("4096", 4096),
        (" 64 kib ", 65536),
        ("7B", 7),
        ("2TiB", 2**41),
        (4096, 4096),
        (0, 0),
    ],
)
def test_a_size_is_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "48G", "-1", "1e9", "1,000", "1.5", "0.3B", "1 2GB", "١٢", "nan", 1.5, True, None, -1, BYTES_MAX + 1],
)
def test_what_is_not_a_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match="is not a") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


def test_an_unknown_unit_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'GO'.*GB.*GiB"):
        parse_bytes("3GO")


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (999_999, "1.00 MB", "977 KiB"),
        (1_310_720_000, "1.31 GB", "1.22 GiB"),
        (48 * 2**30, "51.5 GB", "48.0 GiB"),
        (131_072, "131 kB", "128 KiB"),
        (2**20 - 1, "1.05 MB", "1.00 MiB"),
        (9_996, "10.0 kB", "9.76 KiB"),
        (-1_500, "-1.50 kB", "-1.46 KiB"),
        (0.25, "0.25 B", "0.25 B"),
        (5 * 10**18, "5000 PB", "4441 PiB"),
    ],
)
def test_a_size_is_printed_to_three_figures(count: float, decimal: str, binary: str) -> None:
    assert format_bytes(count) == decimal
    assert format_bytes(count, binary=True) == binary


@given(st.integers(0, 2**50), st.booleans())
def test_a_printed_size_reads_back_within_its_three_figures(count: int, binary: bool) -> None:
    text = format_bytes(count, binary=binary)
    assert bytes_of_printed(text) == pytest.approx(count, rel=0.006)


def bytes_of_printed(text: str) -> int:
    """A printed size may name a fraction of a byte ("1.17 KiB"), which `parse_bytes` refuses; scale it up first."""
    number, unit = text.split()
    return parse_bytes(f"{round(float(number) * 100)} {unit}") // 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2s", 2.0),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("5 min", 300.0),
        ("1h", 3600.0),
        ("7d", 604_800.0),
        ("20us", 20e-6),
        ("1.5", 1.5),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_read(text: str | float, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1e3", "2 s s", float("nan"), float("inf"), -1, True, None])
def test_what_is_not_a_duration_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match="is not a duration") as caught:
        parse_duration(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 us"),
        (12e-6, "12.0 us"),
        (0.0238, "23.8 ms"),
        (0.9999, "1.00 s"),
        (2, "2.00 s"),
        (59.999, "1.00 min"),
        (300, "5.00 min"),
        (7 * 86_400, "7.00 d"),
        (1e-7, "0.10 us"),
    ],
)
def test_a_duration_is_printed_to_three_figures(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
