"""`python -m moonpool` is the same as `moonpool`."""

from __future__ import annotations

from moonpool.cli import main

main()
