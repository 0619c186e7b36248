"""Where inference engines meet the store: one module or package an engine, none imported before it is asked for."""

from __future__ import annotations
