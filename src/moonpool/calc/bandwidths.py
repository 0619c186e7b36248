"""The wires that KV moves over, and how fast each is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moonpool.calc.config import ModelConfigError
from moonpool.sizes import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A wire's name, its bytes a second, and where the figure comes from."""

    name: str
    bytes_per_s: float
    source: str


DEFAULT_BANDWIDTHS = (
    Bandwidth("memcpy, one thread", 9e9, "measured, one core of a two-core server"),
    Bandwidth("PCIe 5.0 x16, one GPU", 55.3e9, "measured, registered shared memory to an H200"),
    Bandwidth("100 GbE", 12.5e9, "line rate"),
    Bandwidth("400 Gb/s InfiniBand", 50e9, "line rate"),
    Bandwidth("NVMe SSD", 7e9, "rated sequential read of PCIe 4.0 x4 drives"),
)

# Case tells bits from bytes here, unlike in sizes, where nobody writes bits.
_BITS = re.compile(r"\s*([\d.]+)\s*([kMGT]?)(?:b|bit|bps|bits)\s*", re.ASCII)
_BIT_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bandwidth(text: str) -> Bandwidth:
    """Return the bandwidth that `text` names: "55GB/s", "100Gb/s" (bits), or either behind a name, "NIC=25GB/s".

    Raises ModelConfigError, naming the text, for anything else, a rate of zero included.
    """
    name, equals, rate = text.rpartition("=")
    amount = re.sub(r"(?:/s|ps)\s*$", "", rate)
    try:
        bits = _BITS.fullmatch(amount)
        bytes_per_s = float(bits[1]) * _BIT_FACTORS[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError as error:
        raise ModelConfigError(
            f"bandwidth {text!r} can't be read: write 55GB/s, 100Gb/s or NAME=25GB/s ({error})"
        ) from None
    if not bytes_per_s:
        raise ModelConfigError(f"bandwidth {text!r} is zero: nothing would ever arrive")
    return Bandwidth(name if equals else f"{format_bytes(bytes_per_s)}/s", bytes_per_s, "given")
