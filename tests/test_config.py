"""Where the node's options come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.capacity import Machine
from moonpool.config import NodeConfig, Setting, default_slots, load_config
from moonpool.errors import ConfigError
from moonpool.folder.folder import default_folder
from moonpool.options import OPTIONS, Address

GIB = 1 << 30
ROOMY = Machine(read_text=lambda path: None, free_bytes=lambda path: 64 * GIB)


def load(
    flags: dict[str, str | None] | None = None, env: dict[str, str] | None = None, path: Path | None = None
) -> NodeConfig:
    return load_config({"dir": "/nowhere/pool", **(flags or {})}, env or {}, path, machine=ROOMY)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "moonpool.toml"


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    file.write_text('pool = "1GiB"\nmode = "read"\nlog_level = "info"\n')
    config = load({"pool": "3GiB"}, {"MOONPOOL_POOL": "2GiB", "MOONPOOL_MODE": "write"}, file)
    assert (config.pool_bytes, config.mode, config.log_level) == (3 * GIB, "write", "info")
    assert config.origins["pool"] == "flag --pool"
    assert config.origins["mode"] == "environment MOONPOOL_MODE"
    assert config.origins["log_level"] == f"file {file}"
    assert config.origins["reserve_wait"] == "default"
    assert config.origins.keys() == OPTIONS.keys()


def test_the_environment_may_name_the_file_and_a_flag_wins_over_it(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    file.write_text('name = "first"')
    other.write_text('name = "second"')
    env = {"MOONPOOL_CONFIG": str(file)}
    assert load({}, env).name == "first"
    assert load({}, env, other).name == "second"


def test_every_option_reads_the_same_from_each_source(file: Path) -> None:
    texts = {
        "dir": "/nowhere/else",
        "pool": "500MB",
        "slots": "100,000",
        "metrics": "[::1]:9400",
        "folder_mode": "0770",
        "group": "1234",
        "reserve_wait": "250ms",
        "pin_share": "25%",
        "checksum_share": "0.2",
        "nice": "-5",
        "scrub_interval": "2h",
        "reconnect_grace": "5m",
        "log_level": "DEBUG",
        "mode": "read",
        "name": "host-7",
        "feed_events": "2048",
        "prefault": "no",
    }
    assert texts.keys() == OPTIONS.keys()
    file.write_text("".join(f'{name} = "{text}"\n' for name, text in texts.items()))
    by_flag = load_config(texts, {}, machine=ROOMY)
    by_variable = load_config({}, {OPTIONS[name].variable: text for name, text in texts.items()}, machine=ROOMY)
    by_file = load_config({}, {}, file, machine=ROOMY)
    for config in (by_flag, by_variable, by_file):
        assert config.dir == Path("/nowhere/else")
        assert config.pool_bytes == 122_071 * 4096, "rounded up to whole pages"
        assert config.slots == 100_000
        assert config.metrics == Address("::1", 9400)
        assert config.folder_mode == 0o770
        assert config.group == 1234
        assert config.reserve_wait_s == 0.25
        assert (config.pin_share, config.checksum_share) == (0.25, 0.2)
        assert (config.scrub_interval_s, config.reconnect_grace_s) == (7200, 300)
        assert (config.log_level, config.mode, config.name) == ("debug", "read", "host-7")
        assert config.feed_events == 2048
        assert config.prefault is False


def test_a_file_may_write_numbers_and_truth_without_quotes(file: Path) -> None:
    file.write_text("pool = 1073741824\nreserve_wait = 0.5\nprefault = false\nslots = 65536\n")
    config = load({}, {}, file)
    assert (config.pool_bytes, config.reserve_wait_s, config.prefault, config.slots) == (GIB, 0.5, False, 65_536)


def test_without_any_source_the_pool_is_computed_and_says_what_bound_it() -> None:
    config = load_config({}, {}, machine=ROOMY)
    assert config.dir == default_folder()
    assert config.origins["dir"] == "default"
    assert (config.folder_mode, config.mode, config.metrics) == (0o700, "on", None)
    config = load()
    assert config.pool_bytes == 32 * GIB
    assert config.origins["pool"].startswith("default, bound by the file system of /")


@pytest.mark.parametrize(
    ("pool_bytes", "slots"),
    [(GIB >> 4, 65_536), (2 * GIB, 131_072), (64 * GIB, 4_194_304), (4096 * GIB, 4_194_304)],
)
def test_slots_follow_the_pool_within_bounds(pool_bytes: int, slots: int) -> None:
    assert default_slots(pool_bytes) == slots
    assert load({"pool": str(pool_bytes)}).slots == slots


def test_an_unknown_key_in_the_file_is_refused_with_a_suggestion(file: Path) -> None:
    file.write_text('scrub-intervall = "1h"')
    with pytest.raises(ConfigError, match=rf"'scrub-intervall' \(file {file}\); did you mean 'scrub_interval'\?"):
        load({}, {}, file)


def test_an_unknown_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'MOONPOOL_POOLS' \(environment\); did you mean 'MOONPOOL_POOL'\?"):
        load({}, {"MOONPOOL_POOLS": "1GiB"})


def test_an_unknown_flag_is_refused_with_the_choice_where_nothing_is_near() -> None:
    with pytest.raises(ConfigError, match=r"'xyz' \(flag\); known are checksum_share, dir, "):
        load({"xyz": "1"})


@pytest.mark.parametrize(
    "variable",
    [
        "MOONPOOL_URL", "MOONPOOL_COPY", "MOONPOOL_LOG",
        "MOONPOOL_SERVICE_HOST", "MOONPOOL_PORT_9400_TCP_ADDR", "MOONPOOL_PORT", "PATH",
    ],
)
def test_variables_of_clients_and_of_kubernetes_are_let_pass(variable: str) -> None:
    assert load({}, {variable: "tcp://10.0.0.1:9400"}) == load()


def test_a_table_in_the_file_is_refused(file: Path) -> None:
    file.write_text('[pool]\nsize = "1GiB"')
    with pytest.raises(ConfigError, match=r"option 'pool' \(file .*\): a text, a number, true or false is wanted"):
        load({}, {}, file)


def test_a_file_that_is_not_there_or_not_toml_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"moonpool\.toml can't be read: No such file"):
        load({}, {}, file)
    file.write_text("pool = 48GiB")
    with pytest.raises(ConfigError, match=r"moonpool\.toml is not TOML"):
        load({}, {}, file)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("pool", "48 gigs", "unknown unit 'gigs'"),
        ("pool", "1023KiB", "a pool has at least 1.00 MiB"),
        ("dir", " ", "the name of a folder is missing"),
        ("slots", "1e6", "not a whole number from 1,024"),
        ("metrics", "9400x", "write host:port"),
        ("metrics", ":9400", "write host:port"),
        ("metrics", "localhost:70000", "write host:port"),
        ("folder_mode", "0777", "strangers may not write"),
        ("folder_mode", "0600", "the owner has all rights"),
        ("folder_mode", "rwx", "0700 is for its user alone"),
        ("folder_mode", "0755", "for a group as well"),
        ("group", "no-such-group", "there is no group 'no-such-group'"),
        ("reserve_wait", "6s", "at most 5 s"),
        ("pin_share", "1.5", "not a share"),
        ("checksum_share", "nan", "not a share"),
        ("nice", "-21", "-20 (first) to 19"),
        ("scrub_interval", "hourly", "not a duration"),
        ("log_level", "warn", "did you mean 'warning'"),
        ("mode", "onn", "did you mean 'on'"),
        ("name", "a/b", "not a name"),
        ("feed_events", "10", "not a whole number from 1,024"),
        ("prefault", "maybe", "neither true nor false"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name_and_place(name: str, text: str, complaint: str) -> None:
    option = OPTIONS[name]
    with pytest.raises(ConfigError) as from_flag:
        load({name: text})
    assert str(from_flag.value).startswith(f"option '{name}' (flag {option.flag}): ")
    assert complaint in str(from_flag.value)
    with pytest.raises(ConfigError) as from_variable:
        load_config({}, {option.variable: text}, machine=ROOMY)
    assert str(from_variable.value).startswith(f"option '{name}' (environment {option.variable}): ")


def test_metrics_may_be_a_bare_port_or_none() -> None:
    assert load({"metrics": "9400"}).metrics == Address("127.0.0.1", 9400)
    assert load({"metrics": "none"}, {"MOONPOOL_METRICS": "0.0.0.0:9400"}).metrics is None
    assert str(Address("::1", 9400)) == "[::1]:9400"


def test_settings_read_back_as_they_are_printed() -> None:
    flags: dict[str, str | None] = {"pool": "500MB", "folder_mode": "0750", "prefault": "no", "reserve_wait": "20ms"}
    settings = load({**flags, "metrics": "[::1]:9400"}).settings()
    assert settings.keys() == OPTIONS.keys()
    assert settings["folder_mode"] == Setting("0750", "flag --folder-mode")
    assert settings["log_level"] == Setting("warning", "default")
    again = load({name: setting.value for name, setting in settings.items()})
    assert [again.settings()[name].value for name in OPTIONS] == [settings[name].value for name in OPTIONS]
