"""Protocol versions: who can talk to whom."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.errors import VersionMismatch
from moonpool.folder.layout import LAYOUT_VERSION
from moonpool.probes import told

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1
FEATURES = {"inline-put": 0, "match": 0, "holds": 0, "feed": 0, "purge": 0, "cancel": 1}
"""What is known, and since which minor version."""


@dataclass(frozen=True, slots=True)
class Version:
    """A protocol version. One minor version apart works in either direction: messages only ever gain trailing
    fields with defaults and new kinds that the `features` of the other side announce."""

    major: int = PROTOCOL_MAJOR
    minor: int = PROTOCOL_MINOR

    @classmethod
    def ours(cls) -> Version:
        """This process's version; `MOONPOOL_TEST=protocol=1.3` pretends to be another, for compatibility tests."""
        pretended = told("protocol")
        if not pretended:
            return cls()
        major, _, minor = pretended.partition(".")
        return cls(int(major), int(minor))

    @property
    def features(self) -> list[str]:
        """What a side of this version knows beside what every version does."""
        return sorted(name for name, minor in FEATURES.items() if minor <= self.minor)

    def check(self, other: Version, layout: int, *, who: str) -> None:
        """Raise `VersionMismatch`, with what to do, unless the two work together: protocol and table `layout`."""
        if layout != LAYOUT_VERSION:
            raise VersionMismatch(
                f"{who} has table layout {layout}, this side {LAYOUT_VERSION}; "
                "install the same release of moonpool on both sides"
            )
        if self.major == other.major and abs(self.minor - other.minor) <= 1:
            return
        raise VersionMismatch(
            f"{who} speaks protocol {other}, this side {self}: at most one minor version apart works; "
            "install the same release of moonpool on both sides"
        )

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def boot_id() -> str:
    """The running kernel's boot id, by which two processes know that they share a host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
