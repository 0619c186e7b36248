"""Every command explains itself, with examples, and starts quickly because it loads nothing that it doesn't need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moonpool.cli import app
from moonpool.cli.base import LAZY, load
from moonpool.options import OPTIONS

OWN = ["serve", "put", "get", "exists", "remove", "stat", "ls", "clear", "status", "mode", "spaces", "purge"]


def help_of(*command: str) -> str:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def own_commands() -> Iterator[tuple[str, Any]]:
    root: Any = typer.main.get_command(app)
    yield from ((name, command) for name, command in root.commands.items() if name not in LAZY)


def test_the_root_lists_all_commands_the_lazy_ones_too() -> None:
    text = help_of()
    for name in [*OWN, *LAZY]:
        assert f" {name} " in text
    assert "Examples" in text


@pytest.mark.parametrize("name", OWN)
def test_a_command_has_examples_of_itself_and_takes_a_url(name: str) -> None:
    text = help_of(name)
    _, _, examples = text.partition("Examples:")
    assert f"moonpool {name}" in examples
    assert "--url" in text


def leaves(name: str) -> Iterator[list[str]]:
    """The command lines of a lazy command: itself, or each of its subcommands."""
    command: Any = load(name)
    subcommands = getattr(command, "commands", None)
    yield from ([name, sub] for sub in subcommands) if subcommands else [[name]]


@pytest.mark.parametrize("name", [name for name in LAZY if importlib.util.find_spec(f"moonpool.{name}")])
def test_the_lazy_commands_have_examples_too(name: str) -> None:
    for command in leaves(name):
        _, _, examples = help_of(*command).partition("Examples")
        assert f"moonpool {' '.join(command)}" in examples
        assert "--url" in help_of(*command)


def test_no_command_is_left_out_here() -> None:
    assert [name for name, _ in own_commands()] == OWN


def test_serve_has_a_flag_for_every_option_of_the_node() -> None:
    serve = dict(own_commands())["serve"]
    flags = {flag for parameter in serve.params for flag in parameter.opts}
    assert {option.flag for option in OPTIONS.values()} <= flags


@pytest.mark.slow
def test_help_loads_neither_torch_nor_an_event_loop() -> None:
    code = (
        "import sys; from moonpool.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('heavy:', sorted({'asyncio', 'uvloop', 'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.rstrip().endswith("heavy: []")
