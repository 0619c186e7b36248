"""Samples as figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

Spread = dict[str, float]


def spread_us(samples_s: Sequence[float]) -> Spread:
    """Quantiles of times in seconds, as microseconds: p50, p99, p999, max."""
    values = np.asarray(samples_s) * 1e6
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
    return {"p50": tidy(p50), "p99": tidy(p99), "p999": tidy(p999), "max": tidy(values.max())}


def median_us(samples_s: Sequence[float]) -> float:
    """The median of times in seconds, as microseconds."""
    return tidy(median(samples_s) * 1e6)


def gbps(size_bytes: int, samples_s: Sequence[float]) -> float:
    """GB/s (1e9 bytes) of copies of `size_bytes` that took `samples_s` each: the median one's."""
    return tidy(size_bytes / median(samples_s) / 1e9)


def tidy(value: float) -> float:
    """Four significant digits: more would claim a precision that no run has."""
    return float(f"{float(value):.4g}")


def size_label(size_bytes: int) -> str:
    """How results name a size: 4KB, 2MB, 1GB, each 1024 of the one before."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"
