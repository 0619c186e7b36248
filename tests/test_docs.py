"""README, docs and examples do what they say: commands and code run as printed, tables say what the code says."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

import moonpool
from moonpool.cli import app
from moonpool.config import load_config
from moonpool.errors import NodeUnavailable
from moonpool.folder.layout import Field, Header, State
from moonpool.node.node import embedded_node
from moonpool.observe.metrics import families
from moonpool.options import OPTIONS
from moonpool.sizes import parse_bytes, parse_duration
from moonpool.testing.node import eventually, running_node
from moonpool.wire import messages
from moonpool.wire.versions import FEATURES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "moonpool"
RUN = ("README.md", "docs/architecture.md", "docs/protocol.md", "docs/operations.md", "docs/engines/vllm.md")
"""Documents whose blocks are run. Others have tests of their own beside what they describe."""
PROSE = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")))
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the number of its first line, and its text."""

    language: str
    line: int
    text: str


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    return [
        Block(found[1], text[: found.start()].count("\n") + 2, found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the lines of output that are printed below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *output = part.splitlines()
        yield command, output


def table(document: str, first_column: str) -> list[list[str]]:
    """The rows of the table whose first column's heading this is: a list of cells each."""
    lines = iter((ROOT / document).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]])
            return rows
    raise AssertionError(f"{document} has no table that begins with {first_column!r}")


def check_same(document: str, first_column: str, expected: list[list[str]]) -> None:
    """The table says what the code says; the failure prints the table that would."""
    should = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert table(document, first_column) == expected, f"{document} should have:\n{should}"


# ---- blocks --------------------------------------------------------------------------------------------------------


class Terminal:
    """A reader who types what a document prints, in an empty folder, with a node's folder of their own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.served: subprocess.Popen[bytes] | None = None
        self.url = f"unix:{base / 'node'}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        self.environment = kept | {"MOONPOOL_URL": self.url, "MOONPOOL_DIR": str(base / "node"), "PATH": path}

    def type(self, command: str) -> str:
        """Run one command as it stands; returns what it printed."""
        words = shlex.split(command, comments=True)
        if words[:2] == ["moonpool", "serve"]:
            return self.serve(words)
        if words[0] == "make":
            return self.run(["make", "-n", *words[1:]], ROOT)  # this may be `make test` itself
        return self.run(words, self.base)

    def run(self, command: list[str], folder: Path, *, both: bool = False) -> str:
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr if both else done.stdout

    def serve(self, command: list[str]) -> str:
        self.stop()
        log = self.base / "serve.log"
        with log.open("wb") as file:
            self.served = subprocess.Popen(command, cwd=self.base, env=self.environment, stdout=file, stderr=file)
        eventually(lambda: self.ready(log), "a node that is ready", within_s=TIMEOUT_S)
        return ""

    def ready(self, log: Path) -> bool:
        assert self.served is not None
        assert self.served.poll() is None, f"the node ended:\n{log.read_text()}"
        try:
            with moonpool.connect(self.url, prefault=False) as client:
                stats = client.stats()
        except NodeUnavailable:
            time.sleep(0.05)
            return False
        return stats.reserved_bytes == stats.pool_bytes

    def stop(self) -> None:
        if self.served is not None and self.served.poll() is None:
            self.served.terminate()
            assert self.served.wait(TIMEOUT_S) == 0


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    # Under /dev/shm and short: the pool lies in it, and a Unix socket's name has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="moonpool-docs-", dir="/dev/shm") as base:
        made = Terminal(Path(base))
        try:
            yield made
        finally:
            made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("document", RUN)
def test_commands_and_code_run_as_printed(document: str, terminal: Terminal) -> None:
    shown = ""  # what the latest Python block printed; a text block right below it says what to expect
    for block in blocks(document):
        if block.language == "text" and shown:
            for line in block.text.splitlines():
                pattern = re.sub(r"\d+", r"\\d+", re.escape(line))
                where = f"{document}:{block.line}"
                assert re.search(f"^{pattern}$", shown, re.MULTILINE), f"{where}: {line!r} isn't printed, but\n{shown}"
        shown = ""
        if block.language == "console":
            for command, output in commands(block):
                skip_where_taken(command)
                printed = terminal.type(command)
                for line in output:
                    pattern = ".*".join(map(re.escape, line.split("…")))
                    assert re.search(f"^{pattern}$", printed, re.MULTILINE), (
                        f"{document}:{block.line}: `{command}` doesn't print {line!r} but\n{printed}"
                    )
        elif block.language == "python":
            script = terminal.base / "block.py"
            script.write_text(block.text)
            shown = terminal.run([sys.executable, script.name], terminal.base, both=True)


def skip_where_taken(command: str) -> None:
    """A printed port may be somebody else's on this machine."""
    found = re.search(r"127\.0\.0\.1:(\d+)", command)
    if found:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(found[1])))
            except OSError:
                pytest.skip(f"port {found[1]} is taken")


@pytest.mark.parametrize("document", RUN)
def test_every_block_is_run_read_or_plain_text(document: str) -> None:
    kinds = {"console", "python", "toml", "yaml", "json", "text"}
    assert [f"line {block.line}" for block in blocks(document) if block.language not in kinds] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run_against_a_node(script: Path) -> None:
    with running_node("64MiB") as node:
        eventually(lambda: node.stats().reserved_bytes == 64 << 20)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "MOONPOOL_URL": node.url},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout, "an example shows something"


def test_the_configuration_file_that_is_printed_is_read(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("docs/operations.md") if block.language == "toml")
    path = tmp_path / "moonpool.toml"
    path.write_text(block.text)
    config = load_config({}, {}, path)
    assert (config.dir, config.pool_bytes, config.scrub_interval_s) == (Path("/dev/shm/engines"), 48 << 30, 6 * 3600)


def test_the_container_s_command_is_one_that_serve_takes() -> None:
    (block,) = (block for block in blocks("docs/operations.md") if block.language == "yaml")
    found = re.search(r"command: \[moonpool, serve, (.*)\]", block.text)
    assert found is not None
    words = [word.strip().strip('"') for word in found[1].split(",")]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    config = load_config({name.removeprefix("--").replace("-", "_"): text for name, text in flags.items()}, {})
    assert f'value: "unix:{config.dir}"' in block.text
    assert parse_bytes(re.search(r"memory: (\w+)i\}", block.text)[1] + "iB") > config.pool_bytes  # type: ignore[index]


# ---- links and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name} links to {target}, which isn't there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{path.name} links to {target}; the headings there are {sorted(slugs)}"


@pytest.mark.parametrize("document", RUN)
def test_files_that_are_named_exist(document: str) -> None:
    for name in re.findall(r"`([\w/]+/\w+\.py)`", (ROOT / document).read_text()):
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{document} names {name}"


@pytest.mark.parametrize("walk", ["put", "get"])
def test_the_walk_names_what_is_in_the_files(walk: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split(f"## One {walk}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\| (\d+) \| `([\w/]+)\.py` \| (.*?) \|", section, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    for _, file, names in steps:
        module = importlib.import_module(f"moonpool.{file.replace('/', '.')}")
        for name in re.findall(r"`([\w.]+)`", names):
            found: Any = module
            for part in name.split("."):
                assert hasattr(found, part), f"{file}.py has no {name}"
                found = getattr(found, part)


# ---- tables --------------------------------------------------------------------------------------------------------


def test_options_are_listed_as_serve_tells_them() -> None:
    group: Any = typer.main.get_command(app)
    parameters = {parameter.name: parameter for parameter in group.commands["serve"].params}
    expected = []
    for name, option in OPTIONS.items():
        parameter = parameters[name]
        default = re.search(r"Default: (.*)\.$", parameter.help)
        flag = f"`{option.flag}`, `--no-{name}`" if name == "prefault" else f"`{option.flag} {parameter.metavar}`"
        expected.append([flag, option.help, default[1] if default else "on"])
    check_same("docs/operations.md", "flag", expected)


def test_metrics_are_listed_as_the_node_serves_them() -> None:
    expected = []
    for family in families(embedded_node(1 << 20)):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels: tuple[str, ...] = getattr(family, "_labelnames", ())
        labels = ("name", "pool", "incarnation") if family.type == "info" else labels
        expected.append([f"`{name}`", family.type, ", ".join(labels), family.documentation])
    check_same("docs/operations.md", "metric", expected)


def test_metrics_that_the_text_names_exist() -> None:
    names = {family.name for family in families(embedded_node(1 << 20))}
    for name in re.findall(r"`(moonpool_\w+?)(?:_total|_info)?`", (ROOT / "docs" / "operations.md").read_text()):
        assert name in names


@pytest.mark.parametrize(("heading", "kinds"), [("Requests", messages.Request), ("Replies", messages.Reply)])
def test_messages_are_listed_with_tags_and_fields(heading: str, kinds: Any) -> None:
    section = (ROOT / "docs" / "protocol.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    assert listed == [
        (str(kind.__struct_config__.tag), kind.__name__, ", ".join(kind.__struct_fields__[1:]) or "–")
        for kind in get_args(kinds)
    ]


def test_structures_within_messages_are_listed() -> None:
    kinds = (messages.Options, messages.GroupKeys, messages.ObjectStat, messages.SpaceInfo, messages.Event)
    expected = [[f"`{kind.__name__}`", ", ".join(kind.__struct_fields__)] for kind in kinds]
    check_same("docs/protocol.md", "structure", expected)


def test_limits_are_what_the_constants_say() -> None:
    for constant, value, file, _ in table("docs/protocol.md", "constant"):
        module = importlib.import_module("moonpool." + file.strip("`").removesuffix(".py").replace("/", "."))
        name = constant.strip("`")
        read = parse_duration if name.endswith("_S") else parse_bytes if "_BYTES_" in name else number
        assert read(value) == getattr(module, name), name


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_layouts_are_listed_word_by_word() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for heading, names in (("### `table`", Header), ("### `records`", Field)):
        section = text.split(f"{heading}\n")[1].split("\n### ")[0]
        listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
        assert listed == [(str(int(word)), word.name) for word in names]
    assert "States are " + ", ".join(f"{int(state)} `{state.name}`" for state in State) in text
    for feature in FEATURES:
        assert f"`{feature}`" in text
