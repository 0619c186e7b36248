"""A failure is one line on standard error and an exit code; never a traceback."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from moonpool.cli import app
from moonpool.cli.base import Commands
from moonpool.errors import NodeUnavailable


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner(env={"MOONPOOL_URL": None, "MOONPOOL_CONFIG": None, **(env or {})}).invoke(app, arguments)


def assert_one_line(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["stts"], ["No such command 'stts'", "'status'", "moonpool --help"]),
        (["get"], ["Missing argument 'KEY'", "get --help"]),
        (["get", "--nope", "key"], ["--nope"]),
        (["put", "key", "file", "--pin", "medium"], ["'medium' is neither hard nor soft"]),
        (["mode", "sideways"], ["'sideways' is none of off, read, write, on"]),
        (["purge"], ["say what to purge"]),
        (["purge", "--space", "xyz"], ["'xyz' is not a digest"]),
        (["exists", "hex:abc"], ["an even number of hexadecimal digits"]),
        (["benhc"], ["'bench'"]),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(arguments: list[str], parts: list[str]) -> None:
    assert_one_line(run(*arguments), 2, *parts)


def test_an_option_of_serve_that_can_not_be_read_is_named() -> None:
    assert_one_line(run("serve", "--pool", "48gigs"), 1, "option 'pool' (flag --pool)", "unknown unit 'gigs'")


def test_an_unknown_variable_stops_serve() -> None:
    assert_one_line(run("serve", env={"MOONPOOL_POOLS": "1GiB"}), 1, "'MOONPOOL_POOLS'", "did you mean 'MOONPOOL_POOL'")


def test_a_pool_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    assert_one_line(run("serve", "--pool", "4000TiB", "--dir", str(folder)), 1, "doesn't fit", "free")
    assert not (folder / "pool").exists()


def test_serve_takes_its_folder_from_a_url_but_not_two_folders() -> None:
    assert_one_line(run("serve", "--url", "unix:/a", "--dir", "/b"), 1, "name two folders, /a and /b")
    assert_one_line(run("serve", "--url", "embedded:"), 1, "a node serves unix:PATH")


def test_a_duration_that_can_not_be_read_is_named() -> None:
    assert_one_line(run("put", "key", "file", "--ttl", "soon"), 1, "option --ttl", "'soon' is not a duration")
    assert_one_line(run("purge", "--older-than", "soon"), 1, "option --older-than")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert_one_line(run("put", "key", str(tmp_path / "nothing")), 1, "nothing: No such file or directory")


def app_that_raises(error: BaseException) -> typer.Typer:
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.callback()
    def root() -> None: ...

    @failing.command()
    def fail(name: Annotated[str, typer.Argument()] = "") -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NodeUnavailable("no node at unix:/x;\nstart one with 'moonpool serve'"), 1, "no node at unix:/x; start one"),
        (OSError(errno.ENOSPC, "No space left on device", "out.bin"), 1, "out.bin: No space left on device"),
        (OSError("something else"), 1, "something else"),
        (typer.Abort(), 1, "stopped; nothing was changed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_operating_condition_is_one_line(error: BaseException, code: int, line: str) -> None:
    assert_one_line(CliRunner().invoke(app_that_raises(error), ["fail"]), code, line)


def test_a_mistake_of_ours_is_not_hidden() -> None:
    result: Any = CliRunner().invoke(app_that_raises(ZeroDivisionError()), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)
