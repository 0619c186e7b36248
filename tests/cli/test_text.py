"""Keys and progress as the command line writes and reads them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cli.base import key_from, key_text, progress


@given(st.binary(max_size=64))
def test_every_key_is_written_so_that_it_reads_back(key: bytes) -> None:
    assert key_from(key_text(key)) == key
    assert "\n" not in key_text(key)


@pytest.mark.parametrize(
    ("key", "text"),
    [(b"prompt-1", "prompt-1"), ("größer".encode(), "größer"), (b"\x00\xff", "hex:00ff"), (b"hex:", "hex:6865783a")],
)
def test_keys_that_are_text_stay_text(key: bytes, text: str) -> None:
    assert key_text(key) == text


def test_progress_is_quiet_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with progress("storing", 100) as advance:
        advance(100)
    assert pipe.getvalue() == ""


def test_progress_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("storing", 100) as advance:
        advance(100)
    assert "storing" in terminal.getvalue()
