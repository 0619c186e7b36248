"""The commands as processes against a real node: what a user at a terminal or in a script sees."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import signal
import subprocess
from pathlib import Path

import pytest

import moonpool
from moonpool.keys import KeySpace
from tests.cli.command_line import COMMAND, ENVIRONMENT, CommandLine

pytestmark = pytest.mark.slow
LARGE = hashlib.shake_128(b"large").digest(5 << 20)  # over the size up to which a value travels in the message


def test_what_is_put_is_got_back_small_and_large(cli: CommandLine, tmp_path: Path) -> None:
    for name, value in (("small", b"few bytes"), ("large", LARGE)):
        source, target = tmp_path / name, tmp_path / f"{name}.out"
        source.write_bytes(value)
        assert cli.ok("put", name, str(source)) == b""
        assert cli.ok("get", name) == value
        assert cli.ok("get", name, "--verify", "-o", str(target)) == b""
        assert target.read_bytes() == value
        assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_put_reads_standard_input_and_hex_keys(cli: CommandLine) -> None:
    cli.ok("put", "hex:00ff17", "-", input=LARGE)
    assert cli.ok("get", "hex:00ff17", "-o", "-") == LARGE
    assert cli.ok("ls") == b"hex:00ff17\n"


def test_a_key_that_is_stored_already_is_left_as_it_is_and_said_so(cli: CommandLine) -> None:
    cli.ok("put", "key", "-", input=b"first")
    again = cli("put", "key", "-", input=b"second")
    assert again.returncode == 0
    assert b"'key' is stored already" in again.stderr
    assert cli.ok("get", "key") == b"first"


def test_an_empty_value_and_one_larger_than_the_pool_are_refused(cli: CommandLine, tmp_path: Path) -> None:
    assert "at least 1 byte" in cli.failed("put", "key", "-", input=b"")
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(65 << 20)
    assert "was not stored: too large" in cli.failed("put", "key", str(huge))
    assert "exceeds the limit of 256" in cli.failed("put", "k" * 257, "-", input=b"value")


def test_a_missing_key_exits_with_1_and_names_it(cli: CommandLine, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert cli.failed("get", "nothing", "-o", str(target)) == "error: not stored: 'nothing'\n"
    assert not target.exists()
    assert "not stored: 'nothing'" in cli.failed("exists", "nothing")
    assert "not stored: 'nothing'" in cli.failed("remove", "nothing")
    assert "not stored: 'nothing'" in cli.failed("stat", "nothing")


def test_exists_says_of_each_key_whether_it_is_there(cli: CommandLine) -> None:
    cli.ok("put", "here", "-", input=b"value")
    assert cli.ok("exists", "here") == b"yes\there\n"
    both = cli("exists", "here", "there")
    assert (both.returncode, both.stdout) == (1, b"yes\there\nno\tthere\n")


def test_remove_leaves_hard_pinned_objects_unless_forced(cli: CommandLine) -> None:
    cli.ok("put", "plain", "-", input=b"value")
    cli.ok("put", "pinned", "-", "--pin", "hard", input=b"value")
    assert "removed only with --force: 'pinned'" in cli.failed("remove", "plain", "pinned")
    assert cli.ok("ls") == b"pinned\n"
    assert cli.ok("remove", "--force", "pinned") == b""
    assert cli.ok("ls") == b""


def test_ls_and_stat_show_what_is_stored(cli: CommandLine) -> None:
    cli.ok("put", "a-1", "-", "--ttl", "1h", "--metadata", "about it", input=b"12345")
    cli.ok("put", "b-1", "-", input=b"1")
    assert cli.ok("ls", "a-") == b"a-1\n"
    size, _, pin, key = cli.ok("ls", "a-", "--long").decode().rstrip("\n").split("\t")
    assert (size, pin, key) == ("5", "-", "a-1")
    listed = [json.loads(line) for line in cli.ok("ls", "--json").splitlines()]
    assert sorted((entry["key"], entry["size"]) for entry in listed) == [("a-1", 5), ("b-1", 1)]
    (shown,) = json.loads(cli.ok("stat", "a-1", "--json"))
    assert (shown["key"], shown["size"], shown["metadata"]) == ("a-1", 5, "about it")
    assert 0 < shown["expiry"] - shown["created"] <= 3600
    assert b"metadata   about it" in cli.ok("stat", "a-1")


def test_clear_and_purge_ask_first(cli: CommandLine) -> None:
    cli.ok("put", "key", "-", input=b"value")
    for command in (["clear"], ["purge", "--older-than", "1ms"]):
        for answer in (b"n\n", b""):
            done = cli(*command, input=answer)
            assert done.returncode == 1
            assert done.stdout == b""
            assert done.stderr.endswith(b"error: stopped; nothing was changed\n")
        assert cli.ok("exists", "key")
    assert cli("purge", "--older-than", "1ms", input=b"y\n").stdout == b"purged 1 objects\n"
    assert cli.ok("ls") == b""
    cli.ok("put", "key", "-", input=b"value")
    assert cli("clear", input=b"y\n").stdout == b"removed 1 objects\n"
    assert cli.ok("ls") == b""


def test_the_mode_is_shown_and_set_and_obeyed(cli: CommandLine) -> None:
    assert cli.ok("mode") == b"on\n"
    cli.ok("put", "key", "-", input=b"value")
    cli.ok("mode", "read")
    assert cli.ok("mode") == b"read\n"
    assert "was not stored: disabled" in cli.failed("put", "other", "-", input=b"value")
    assert cli.ok("get", "key") == b"value"
    cli.ok("mode", "off")
    assert "moonpool mode" in cli.failed("get", "key")
    said = cli("exists", "key")
    assert (said.returncode, said.stdout) == (1, b""), "neither yes nor no"
    assert "reading is switched off" in said.stderr.decode()


def test_spaces_count_what_lies_in_each(cli: CommandLine) -> None:
    weights = "sha256:" + "0" * 64
    space = KeySpace(model="tiny", weights=weights, tokens_per_block=16, kv_dtype="bfloat16", layout="flat")
    with moonpool.connect(cli.url) as client:
        client.declare(space)
        client.put_many(space.keys([bytes(32), bytes(31) + b"1"]), [b"a" * 10, b"b" * 20])
    cli.ok("put", "of no space", "-", input=b"value")
    listed = [json.loads(line) for line in cli.ok("spaces", "--json").splitlines()]
    by_digest = {entry["digest"]: entry for entry in listed}
    assert (by_digest[""]["objects"], by_digest[""]["bytes"]) == (1, 5)
    assert (by_digest[space.digest.hex()]["objects"], by_digest[space.digest.hex()]["bytes"]) == (2, 30)
    assert by_digest[space.digest.hex()]["description"]["model"] == "tiny"
    assert cli.ok("purge", "--model", "tiny", "--yes") == b"purged 2 objects\n"
    assert cli.ok("ls") == b"of no space\n"


def test_status_is_for_people_and_for_programs(cli: CommandLine) -> None:
    cli.ok("put", "key", "-", input=b"value")
    figures = json.loads(cli.ok("status", "--json"))
    assert figures["pool_bytes"] == 64 << 20
    assert b"64.0 MiB" in cli.ok("status")


def test_status_watch_goes_on_until_it_is_interrupted(cli: CommandLine) -> None:
    # A shell has the commands that it runs in the background, and so maybe this test, ignore interrupts.
    command = ["env", "--default-signal=INT", *COMMAND, "status", "--watch", "--every", "10ms", "--json"]
    with subprocess.Popen(
        command, env={**ENVIRONMENT, "MOONPOOL_URL": cli.url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None
        for _ in range(3):
            assert json.loads(watching.stdout.readline())["pool_bytes"] == 64 << 20
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=30)
    assert (watching.returncode, said) == (0, b"")


def on_terminal(cli: CommandLine, *arguments: str) -> tuple[int, str]:
    """Exit code of a command, and what a terminal shows of it."""
    environment = {**ENVIRONMENT, "MOONPOOL_URL": cli.url, "TERM": "xterm", "COLUMNS": "120"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end has been closed
            break
    os.close(ours)
    return process.wait(30), shown.decode()


def test_a_large_put_shows_progress_on_a_terminal(cli: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(LARGE)
    code, shown = on_terminal(cli, "put", "large", str(source))
    assert code == 0
    assert "storing large" in shown


def test_get_writes_text_to_a_terminal_but_not_binary(cli: CommandLine) -> None:
    cli.ok("put", "text", "-", input="größer\n".encode())
    cli.ok("put", "binary", "-", input=bytes(range(256)))
    assert on_terminal(cli, "get", "text") == (0, "größer\r\n")
    code, shown = on_terminal(cli, "get", "binary")
    assert code == 1
    assert "'binary' isn't text: name a file with -o, or pipe it" in shown


def test_output_into_a_pipe_that_was_closed_is_no_traceback(cli: CommandLine) -> None:
    cli.ok("put", "large", "-", input=LARGE)
    pipeline = " ".join([*COMMAND, "get", "large", "|", "head", "-c", "10"])
    done = subprocess.run(
        ["/bin/sh", "-c", pipeline], env={**ENVIRONMENT, "MOONPOOL_URL": cli.url}, capture_output=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (LARGE[:10], b"")


def test_without_a_node_every_command_says_so_in_one_line(tmp_path: Path) -> None:
    nowhere = CommandLine(tmp_path / "nowhere")
    for command in (["status"], ["get", "key"], ["ls"], ["mode"], ["spaces"], ["clear", "--yes"]):
        assert str(tmp_path / "nowhere") in nowhere.failed(*command)


def test_a_second_node_on_the_folder_is_refused(cli: CommandLine, serving: subprocess.Popen[str]) -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--dir", str(cli.folder), "--pool", "64MiB"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: another node (pid {serving.pid}) is serving {cli.folder}")


def test_serve_says_what_it_serves_and_stops_cleanly_on_a_signal(
    cli: CommandLine, serving: subprocess.Popen[str]
) -> None:
    assert serving.stderr is not None
    assert serving.stderr.readline() == (f"moonpool: node tested serves {cli.folder}, pool 64.0 MiB, 65,536 slots\n")
    serving.send_signal(signal.SIGTERM)
    _, said = serving.communicate(timeout=30)
    assert (serving.returncode, said) == (0, "")
